"""A report as one page that loads nothing from elsewhere, legible on a light and on a dark screen.

    page(said, picture)    the page of the JSON of a report, of an attention or of a whole model
    picture(xray)          the X-ray as SVG; "" without matplotlib, or where there is no X-ray

Before: report.py, model_report.py. After: __main__.py.
"""

from html import escape
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from ring_doctor.answers import OK, REFUSED
from ring_doctor.xray import XRay

CHAPTERS = Path(__file__).parents[1] / "notebooks"
SHOWN = {OK: "ok", REFUSED: "quiet"}  # colours of answers; the others are sick
PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ring doctor: $name</title>
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
td:nth-child(2) { min-width: 18rem; }
pre { font-size: .87rem; line-height: 1.35; } figure { margin: 0; overflow-x: auto; } figure svg { max-width: 100%; }
</style>
</head>
<body>
<h1 class="$state">$verdict</h1>
$about
$mistakes
$xray
<h2>Answers</h2>
<p class="quiet">A wrong result is off by a share of the right result's norm.</p>
<div class="wide"><table>
<tr><th>answer</th><th>question</th><th>result</th></tr>
$answers
</table></div>
<p class="quiet">torch $torch</p>
</body>
</html>
""")


def page(said: dict[str, Any], picture: str = "") -> str:
    """The page, as text, with the X-ray as a picture where there is one."""
    about = [f"Level: {said['level']}.", said.get("about"), said.get("version"), *said["remarks"], *said["inference"]]
    xray = [f"<h2>X-ray</h2>\n<p>{escape(said['xray_of'])}</p>"] if "xray" in said else []
    xray += [f"<figure>{picture[picture.index('<svg') :]}</figure>"] if picture else []
    xray += [f"<pre>{escape(said['xray'])}</pre>"] if said.get("xray") else []
    rows = [(SHOWN.get(it["state"], "sick"), it["state"], it["question"], it["found"]) for it in said["answers"]]
    return PAGE.substitute(
        name=escape(said["name"]),
        state="ok" if said["healthy"] else "sick",
        verdict=escape(said["verdict"]),
        about="\n".join(f"<p>{escape(words)}</p>" for words in about if words),
        mistakes="\n".join(_mistake(name, facts) for name, facts in said["facts"].items()),
        xray="\n".join(xray),
        answers="\n".join(
            f"<tr><td class={kind!r}>{'</td><td>'.join(map(escape, cells))}</td></tr>" for kind, *cells in rows
        ),
        torch=said["torch"],
    )


def picture(xray: XRay | str) -> str:
    """The X-ray as SVG."""
    if not isinstance(xray, XRay) or find_spec("matplotlib") is None:
        return ""
    from ring_doctor.xray_picture import svg

    return svg(xray)


def _mistake(name: str, facts: dict[str, str]) -> str:
    said = {heading: escape(words) for heading, words in facts.items()}
    for path in CHAPTERS.glob(f"{int(facts['chapter'].split()[0]):02}_*.ipynb"):
        said["chapter"] = f'<a href="{path.as_uri()}">{said["chapter"]}</a>'
    rows = "".join(f"<dt>{heading}</dt><dd>{words}</dd>" for heading, words in said.items())
    return f"<h3>{name}</h3>\n<dl>{rows}</dl>"
