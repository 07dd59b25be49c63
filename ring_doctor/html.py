"""A report as one page that loads nothing from elsewhere, legible on a light and on a dark screen.

    page(report)              ->  the page of an attention
    page_of_model(report)     ->  the page of a whole model
    picture(report)           ->  the X-ray as SVG; None without matplotlib, or where there is no X-ray

Shapes: none here.

Before: report.py, model_report.py. After: __main__.py.
Source: none.
"""

from html import escape
from importlib.util import find_spec
from pathlib import Path
from string import Template

import torch

from ring_doctor.answers import OK, REFUSED, Answer
from ring_doctor.mistakes import Mistake
from ring_doctor.model_report import ModelReport
from ring_doctor.report import RESULTS, Report, asked, errors_of, facts, rounding_of
from ring_doctor.xray import XRay

CHAPTERS = Path(__file__).parents[1] / "notebooks"
PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ok: #006b4c; --sick: #b03a00; --line: #8886; --quiet: #606870; }
@media (prefers-color-scheme: dark) { :root { --ok: #3fcf9f; --sick: #ff9a5c; --quiet: #a0a8b0; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-family: monospace; font-size: 1rem; }
.ok { color: var(--ok); } .sick { color: var(--sick); } .quiet { color: var(--quiet); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { color: var(--quiet); } dd { margin: 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .87rem; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:nth-child(2) { min-width: 18rem; } .allowed { white-space: nowrap; }
pre { font-size: .87rem; line-height: 1.35; } figure { margin: 0; overflow-x: auto; } figure svg { max-width: 100%; }
</style>
</head>
<body>
<h1 class="$state">$verdict</h1>
$about
$inference
$mistakes
$body
<p class="quiet">torch $torch</p>
</body>
</html>
""")

OF_ATTENTION = Template("""\
<h2>X-ray</h2>
$xray
<h2>What was asked</h2>
<p>$asked</p>
<h2>Answers</h2>
<p class="quiet">The number below a wrong result is its error in norm, as a share of the right result's norm.</p>
<div class="wide"><table>
<tr><th>answer</th><th>question</th>$results<th></th></tr>
$answers
</table></div>""")


def page(report: Report) -> str:
    """The page, as text."""
    patient = report.examination.patient
    about = [f"Level: {report.level}.", patient.about, patient.version and f"version {patient.version}"]
    about += report.remarks
    return PAGE.substitute(
        title=escape(f"ring doctor: {patient.name}"),
        state="ok" if report.healthy else "sick",
        verdict=escape(report.verdict),
        about="\n".join(f"<p>{escape(words)}</p>" for words in about if words),
        inference="\n".join(f"<p>{escape(sentence)}</p>" for sentence in report.inference),
        mistakes="\n".join(_mistake(mistake) for mistake in report.mistakes),
        body=OF_ATTENTION.substitute(
            xray=_xray(report),
            asked=escape("; ".join(asked(report.examination.answers))),
            results="".join(f"<th>{name}</th>" for name in RESULTS),
            answers="\n".join(_row(answer) for answer in report.examination.answers),
        ),
        torch=torch.__version__,
    )


def page_of_model(report: ModelReport) -> str:
    """The page, as text."""
    rows = []
    for world in report.examination.worlds:
        kind = "ok" if world.right else "sick"
        said = escape(world.says(report.examination.allowed))
        rows.append(f'<tr><td class="{kind}">{world.state}</td><td>{world.asked}</td><td>{said}</td></tr>')
    return PAGE.substitute(
        title=escape(f"ring doctor: {report.name}"),
        state="ok" if report.healthy else "sick",
        verdict=escape(report.verdict),
        about="\n".join(f"<p>{escape(words)}</p>" for words in report.remarks),
        inference="\n".join(f"<p>{escape(sentence)}</p>" for sentence in report.inference),
        mistakes="\n".join(_mistake(mistake) for mistake in report.mistakes),
        body="\n".join(['<h2>Answers</h2>\n<div class="wide"><table>', *rows, "</table></div>"]),
        torch=torch.__version__,
    )


def picture(report: Report) -> str | None:
    """The X-ray as SVG."""
    if not isinstance(report.xray, XRay) or find_spec("matplotlib") is None:
        return None
    from ring_doctor.xray_picture import svg

    return svg(report.xray)


def _mistake(mistake: Mistake) -> str:
    said = {heading: escape(words) for heading, words in facts(mistake)}
    for path in CHAPTERS.glob(f"{mistake.chapter:02}_*.ipynb"):
        said["chapter"] = f'<a href="{path.as_uri()}">{said["chapter"]}</a>'
    rows = "".join(f"<dt>{heading}</dt><dd>{words}</dd>" for heading, words in said.items())
    return f"<h3>{mistake.name}</h3>\n<dl>{rows}</dl>"


def _xray(report: Report) -> str:
    if not isinstance(report.xray, XRay):
        return f"<p>{escape(report.xray)}</p>"
    drawn = picture(report)
    figure = f"<figure>{drawn[drawn.index('<svg') :]}</figure>\n" if drawn else ""
    return f"<p>{escape(report.xray.case.words())}</p>\n{figure}<pre>{escape(report.xray.text())}</pre>"


def _row(answer: Answer) -> str:
    state = "ok" if answer.state == OK else "quiet" if answer.state == REFUSED else "sick"
    cells = [f'<td class="{state}">{answer.state}</td>', f"<td>{escape(answer.question.words())}</td>"]
    errors = errors_of(answer)
    for name in RESULTS:
        kind = "sick" if name in answer.wrong else "ok"
        cells.append(f'<td class="{kind}">{errors.get(name, "")}</td>')
    kind, last = ("allowed", rounding_of(answer)) if answer.errors and not answer.says else ("", answer.says)
    return f'<tr>{"".join(cells)}<td class="{kind}">{escape(last)}</td></tr>'
