"""What the tests of JAX share: tensors to JAX and back, and the check of four results."""

import numpy as np
import torch

from ringlab.support.rounding import exact_attention
from tests.attention import assert_right
from tests.gradients import NAMES

OPTIONS = {  # of the compiler
    "xla_backend_optimization_level": 0,  # quick to compile, slow to run
    "xla_allow_excess_precision": False,  # else XLA leaves out roundings to 16 bits that the program asks for
}


def to_jax(x):
    import jax.numpy as jnp

    return jnp.asarray(x.float().numpy(), jnp.bfloat16) if x.dtype == torch.bfloat16 else jnp.asarray(x.numpy())


def to_torch(x):
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(x, np.float32)).bfloat16()
    return torch.tensor(np.array(x))


def assert_all_right(mine, *inputs, **options):
    """out, dq, dk, dv are as near as rounding allows to full attention."""
    right = exact_attention(*inputs, **options)
    for name, x in zip(NAMES, mine, strict=True):
        assert_right(x, right[name], name)


def equations(jaxpr, times=1):
    """All equations of a jaxpr and of those inside it, each with how many times it runs."""
    for equation in jaxpr.eqns:
        yield equation, times
        runs = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else [parameter]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner, runs)
