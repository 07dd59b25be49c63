"""The options of the command. Those about the ring are claims of a `Patient`, under the names of its fields.

    --heads 8 --kv-heads 2 --tensors bshd --equal-chunks    ->    heads=8, kv_heads=2, tensors="bshd", unequal=False

Before: asking/patient.py. After: __main__.py, the command.
"""

import argparse
from dataclasses import fields
from typing import Any

from ring_doctor.asking.job import SECONDS
from ring_doctor.asking.patient import MOST, TENSORS, Patient
from ringlab.options import Parser, new_file, positive
from ringlab.ring.layouts import LAYOUTS

DESCRIPTION = """\
Is your ring attention right, and if not, which mistake is it?

The doctor calls your function on 1 to 5 processes, with many masks, lengths and dtypes. It compares output and
gradients with full attention in float64, names the mistake, and takes an X-ray of the weights."""

EXAMPLES = """\
your function
  module:function, module:Class.method or path/to/file.py:function; each process imports it by this name.
  It is called on each rank with its chunks, f(q, k, v), and returns out, or (out, lse). q is (B, H, C, D), k and v are
  (B, G, C, D), or as --tensors says. Of these options it gets those that its signature has:
    causal     or is_causal                              window     or window_size, flash-attn's (left, right)
    scale      or softmax_scale, sm_scale, scaling       documents  lengths; or cu_seqlens, where they begin and end
    group      or process_group, pg, cp_group, sp_group  layout, sinks

examples
  ring-doctor my_package.ring:attention
  ring-doctor my_package.ring:attention --causal --layout zigzag --html report.html
  ring-doctor my_package.ring:attention --tensors bshd --heads 8 --kv-heads 2 --head-dim 64 --shape 1,8,2,4096,64
  ring-doctor my_package.ring:attention --layout my_package.ring:positions    your own layout: where tokens stand,
                                                              positions(seq_len, rank, world_size) -> (C,)
  ring-doctor run "torchrun --nproc_per_node=1 train.py" "torchrun --nproc_per_node=4 train.py --cp 4"
                                                              two runs of a training script: docs/running_jobs.md
  ring-doctor --model my_package.train:step --layout zigzag   a step of a whole model: labels, positions, loss and
                                                              gradients: ring_doctor/whole_models/whole_model.py

exit status
  0 healthy, or healthy for what it takes    1 sick    2 bad input    3 cannot tell
  docs/doctor_in_ci.md has workflows to copy, and JUnit XML by pytest."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options of the command. Bad options end the process with status 2 and one sentence."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="ring-doctor", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=as_written)
    parser.usage = "ring-doctor [options] module:function"
    add = parser.add_argument
    add("patient", metavar="module:function", help="the attention, or a module that is a patient file")
    add("--model", action="store_true", help="the function is a training step of a whole model")
    state = "the function is a ring of states, f(q, k, v, log_decay, beta), or a short convolution f(x, weight)"
    add("--state", action="store_const", const=True, help=state)
    keys = "the same, where log_decay has the shape of k: a decay for each number of a key"
    add("--state-of-each-key", dest="state", action="store_const", const="each key", help=keys)

    layouts = f"{', '.join(LAYOUTS)}, or module:function. Without it, all three if the function takes layout=, else "
    add = parser.add_argument_group("what to ask (by default, what the signature allows)").add_argument
    add("--causal", action=argparse.BooleanOptionalAction, help="ask for causal attention only, or never")
    add("--layout", dest="layouts", help=f"{layouts}contiguous")
    add("--forward-only", dest="gradients", action="store_const", const=False, help="do not ask for gradients")
    add("--equal-chunks", dest="unequal", action="store_const", const=False, help="all ranks have equally many tokens")
    add("--one-head-dim", dest="own_values", action="store_const", const=False, help="V has the head size of K")
    add("--dtype", dest="dtypes", metavar="DTYPE", help="ask in this dtype alone (else float64, float32, bfloat16)")
    add("--worlds", type=_numbers, metavar="1,2,3,4", help=f"ranks, {MOST} at most")

    add = parser.add_argument_group("in which shapes").add_argument
    order = "the order of dimensions: b batch, s tokens of the rank, h heads, d head size (bhsd)"
    add("--tensors", choices=tuple(TENSORS), help=order)
    add("--batch", type=int, metavar="B", help="sequences (1)")
    add("--heads", type=int, metavar="H", help="query heads (2)")
    add("--kv-heads", type=int, metavar="G", help="key/value heads (as many as query heads)")
    add("--head-dim", type=int, metavar="D", help="head size (4)")
    add("--chunk", type=int, metavar="C", help="tokens of each rank (6)")
    large = "one more question in your sizes, S tokens on all ranks; it takes 10 s or so for each 10 million of B H S²"
    add("--shape", type=_numbers, metavar="B,H,G,S,D", help=large)

    add = parser.add_argument_group("how").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda: NCCL; ranks may share a GPU (auto)")
    add("--time-limit", type=float, default=SECONDS, metavar="S", help=f"seconds for a question ({SECONDS:g})")
    add("--seed", type=int, default=0, help="of the random inputs (0)")
    add("--quick", action="store_true", help="ask each kind of question until one is answered")
    add("--vocab", type=positive, metavar="V", help="tokens of a --model are below V (32)")

    add = parser.add_argument_group("what to write, besides the report on the terminal").add_argument
    add("--json", type=new_file(".json"), metavar="FILE", help="every answer, for other programs")
    add("--html", type=new_file(".html"), metavar="FILE", help="one page; with matplotlib, its X-ray is a picture")

    args = parser.parse_args(argv)
    if args.model and (args.quick or set(claims_of(args)) - {"layouts"}):
        parser.error("a --model takes --layout, --vocab, --seed, --device and --time-limit; expected no other question")
    if args.vocab and not args.model:
        parser.error("--vocab is given without --model; expected none: an attention takes no tokens")
    if not 0 < args.time_limit < float("inf"):
        parser.error(f"--time-limit is {args.time_limit:g}; expected a number of seconds")
    return args


def parse_run(argv: list[str]) -> argparse.Namespace:
    """The options of `ring-doctor run`. Bad options end the process as those of `parse` do."""
    about = "Are the gradients of the second command those of the first? docs/running_jobs.md says what is compared."
    parser = Parser(prog="ring-doctor run", description=about)
    parser.set_defaults(patient="", html=None)
    add = parser.add_argument
    add("one", metavar='"COMMAND"', help="a job that is right: one process, or any run that you trust")
    add("many", metavar='"COMMAND"', help="the job that is asked: the same weights, batch and precision, on many ranks")
    add("--steps", type=positive, default=1, metavar="N", help="compare steps 1 to N of the optimizer, then end (1)")
    add("--exact", action="store_true", help="spare the third run, which measures what rounding may change")
    add("--time-limit", type=positive, default=600, metavar="S", help="seconds for a run (600)")
    add("--json", type=new_file(".json"), metavar="FILE", help="the verdict and every gradient, for other programs")
    return parser.parse_args(argv)


def claims_of(args: argparse.Namespace) -> dict[str, Any]:
    """The claims of the options that were given. A patient file may say the others."""
    given = {name: claim for name, claim in vars(args).items() if claim is not None}
    return {field.name: given[field.name] for field in fields(Patient) if field.name in given}


def _numbers(text: str) -> tuple[int, ...]:
    """A type for options: whole numbers with commas between them."""
    return tuple(map(positive, text.split(",")))
