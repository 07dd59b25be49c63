"""What the command may be told about a ring, and the claims of a `Patient` that follow from it.

    --heads 8 --kv-heads 2 --tensors bshd --equal-chunks    ->    heads=8, kv_heads=2, tensors="bshd", unequal=False

`ring_doctor.examine` and `ring_doctor.assert_ring` take the claims themselves.

Shapes: none here.

Before: patient.py. After: __main__.py, the command.
Source: none.
"""

import argparse
from typing import Any

from ring_doctor.case import LAYOUTS
from ring_doctor.patient import TENSORS


def add_claims(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command."""
    asked = parser.add_argument_group("what to ask (by default, what the signature allows)")
    asked.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, help="ask for causal attention only, or never"
    )
    asked.add_argument(
        "--layout",
        help=f"{', '.join(LAYOUTS)}, or module:function. Without it, all three if the function takes layout=, else "
        "contiguous",
    )
    asked.add_argument("--forward-only", action="store_true", help="do not ask for gradients")
    asked.add_argument("--equal-chunks", action="store_true", help="all ranks always have as many tokens")
    asked.add_argument("--dtype", metavar="DTYPE", help="ask in this dtype only (float64, then float32 and bfloat16)")
    asked.add_argument("--worlds", type=_numbers("numbers of ranks, as 1,2,3,4"), metavar="1,2,3,4", help="ranks")
    shapes = parser.add_argument_group("in which shapes")
    shapes.add_argument(
        "--tensors",
        choices=tuple(TENSORS),
        help="the order of dimensions: b batch, s tokens of the rank, h heads, d head size (bhsd)",
    )
    shapes.add_argument("--batch", type=int, metavar="B", help="sequences (1)")
    shapes.add_argument("--heads", type=int, metavar="H", help="query heads (2)")
    shapes.add_argument("--kv-heads", type=int, metavar="G", help="key/value heads (as many)")
    shapes.add_argument("--head-dim", type=int, metavar="D", help="head size (4)")
    shapes.add_argument("--chunk", type=int, metavar="C", help="tokens of each rank (6)")
    shapes.add_argument(
        "--shape",
        type=_numbers("five sizes, as 1,8,2,4096,64", 5),
        metavar="B,H,G,S,D",
        help="one more question in your sizes, S tokens in all, on the most ranks that can share them; the exact "
        "answer takes some ten seconds for each 10 million of B H S²",
    )


def claims_of(args: argparse.Namespace) -> dict[str, Any]:
    """The claims of the options that were given. A patient file may say the others."""
    plain = ("tensors", "batch", "heads", "kv_heads", "head_dim", "chunk", "shape")
    claims = {name: getattr(args, name) for name in plain}
    claims["causal"] = None if args.causal is None else (args.causal,)
    claims["layouts"] = (args.layout,) if args.layout else None
    claims["dtypes"] = (args.dtype,) if args.dtype else None
    claims["worlds"] = tuple(sorted(set(args.worlds))) if args.worlds else None
    claims["gradients"] = False if args.forward_only else None
    claims["unequal"] = False if args.equal_chunks else None
    return {name: claim for name, claim in claims.items() if claim is not None}


def _numbers(what: str, count: int | None = None) -> Any:
    def numbers(words: str) -> tuple[int, ...]:
        each = words.split(",")
        if not all(number.isdecimal() and int(number) for number in each) or count not in (None, len(each)):
            raise argparse.ArgumentTypeError(f"{words!r} given, expected {what}")
        return tuple(map(int, each))

    return numbers
