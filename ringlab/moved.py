"""Where the modules of older versions are now: an import of an old name fails with an ImportError that tells it."""

from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

NOW = {  # old folder: its modules, as old names or old=new, by their new folder
    "ringlab.training": {
        "ringlab.ring": "backward cases causal documents flash_ring fused_block grouped_query layouts masks overlap "
        "partition schedule",
        "ringlab.ways": "all_gather all_to_all double_ring heads hybrid shared_memory",
        "ringlab.ways.jax": "jax_block=block jax_ring=ring",
        "ringlab.states": "linear_attention short_convolution state_ring",
    },
    "ringlab.planning": {
        "ring_planner": "calibrate cost_model=command hidden_communication machine memory pass_q_or_kv plan presets "
        "round_costs seconds step unequal ways",
    },
    "ringlab.models": {
        "ringlab.hugging_face": "hugging_face=use hugging_face_batch=batch hugging_face_generate=generate "
        "hugging_face_masks=masks hugging_face_pass=forward hugging_face_proof=proof hugging_face_states=states "
        "hugging_face_trainer=trainer",
    },
}
MOVED = {
    f"{old}.{name.partition('=')[0]}": f"{new}.{name.rpartition('=')[2]}"
    for old, homes in NOW.items()
    for new, names in homes.items()
    for name in names.split()
}


class Moved:
    """A finder that Python asks last, for what no other has found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name in MOVED:
            raise ImportError(f"{name} is now {MOVED[name]}", name=name)
        return ModuleSpec(name, None, is_package=True) if name in NOW else None  # an empty folder, to be asked further
