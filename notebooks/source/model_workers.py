"""What chapter 12 runs, on one process and on the ranks of a ring: small models of transformers."""

import contextlib
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from matplotlib.patches import Rectangle
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ringlab.hugging_face.batch import BATCH, shard_batch
from ringlab.support import drawing, processes
from ringlab.support.processes import PRELOAD, RankContext

PRELOAD.append(__name__)  # transformers is imported once, not once a rank
logging.disable_progress_bar()  # of loading and saving weights
logging.set_verbosity_error()
SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
SIZES |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
LOOP = (Path(__file__).parents[2] / "examples" / "fsdp2.py").read_text()


def tiny(name: str, **options: object) -> PreTrainedModel:
    """A small random model in float64, with the same weights in every process."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **options})
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")  # others know no float64
    return model.double().train()


def run_loop(context: RankContext, folder: str, loader: list) -> list[float]:
    """Run the training loop of examples/fsdp2.py as it stands, with a model and batches of ours -> its losses."""
    kept: list[float] = []
    model = partial(AutoModelForCausalLM.from_pretrained, folder)

    def keep(losses: list[float], model: PreTrainedModel) -> None:
        kept.extend(losses)

    steps = Path(folder) / f"steps on {context.world_size}"  # a run of its own, which begins anew
    steps.mkdir(exist_ok=True)
    tiny = SimpleNamespace(model=model, batches=lambda: loader, keep=keep, DEVICE="cpu", FOLDER=steps)
    joined = mock.patch.object(processes, "join_ring", return_value=contextlib.nullcontext(context))  # it has joined
    with joined, mock.patch.dict(sys.modules, tiny=tiny):
        exec(LOOP, {})
    return kept


def chapter(context: RankContext, folder: str, loader: list) -> tuple:
    """All that the chapter asks of the ranks: this rank's shard, and what the loop prints."""
    return dict(shard_batch(BATCH)), run_loop(context, folder, loader)


def picture_of_seen(seen: dict[str, Tensor]) -> drawing.Picture:
    """Which tokens (columns) change the logits of a token (rows), for each name: (S, S) booleans, 4 ranks."""
    alt = (
        "Two squares of 32 rows, the tokens, and 32 columns, the tokens that they see, coloured by the rank that holds "
        "them. Left, the whole text: a full triangle below the diagonal. Right, four chunks with the ring not called: "
        "only four small triangles on the diagonal; no token sees a token of another rank."
    )
    figure, page = drawing.canvas(1000, 560, alt)
    drawing.write(page, 20, 34, "Which tokens change the logits of a token?", size=drawing.TITLE, weight="bold")
    of = "found by gradients; colours: the rank that holds the token that is seen"
    drawing.write(page, 20, 66, of, color=drawing.MUTED)
    for x, (name, of_name) in zip((70, 570), seen.items(), strict=True):
        S = len(of_name)
        drawing.write(page, x, 104, name, weight="bold")
        for i, j in of_name.nonzero().tolist():
            spot, colour = (x + 12 * j, 130 + 12 * i), drawing.colour(4 * j // S)
            page.add_patch(Rectangle(spot, 12, 12, fc=colour, ec=drawing.PAGE, lw=0.6))
        page.add_patch(Rectangle((x, 130), 12 * S, 12 * S, fill=False, ec=drawing.MUTED, lw=1))
        drawing.write(page, x - 12, 130 + 6 * S, "tokens", ha="center", rotation=90, color=drawing.MUTED)
        drawing.write(page, x + 6 * S, 532, "tokens that they see", ha="center", color=drawing.MUTED)
    return figure
