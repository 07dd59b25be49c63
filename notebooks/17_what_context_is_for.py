# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 17 · What context is for
#
# A ring trains on longer texts. This chapter asks what a model gains by that. After it you can
#
# - say why a model fails on texts that are longer than those of its training, and show where in the text it fails,
# - train with 4 times the [context](../GLOSSARY.md#context), in the same memory on each [rank](../GLOSSARY.md#rank),
# - say when more context helps a model that learns from what it sees, and when it cannot help.
#
# 20 minutes to read, 20 for the exercises. The code: [`models/retrieval.py`](../models/retrieval.py) and
# [`models/in_context_rl.py`](../models/in_context_rl.py). Before: [12 · a model in the ring](12_a_model_in_the_ring.ipynb).

# %%
# %matplotlib inline
import torch

from figures import in_context_rl as rewards_picture
from figures import retrieval as picture
from models import in_context_rl, retrieval
from notebooks.checks.what_context_is_for import check_depths, check_pairs, check_window
from notebooks.show import print_source
from support.processes import launch

# %% [markdown]
# ## The task
#
# A text has lines, each with an id and a number. The question is the id of one of the lines, and the answer is its
# number. (The paper's figure 3 asks this of texts of 512,000 tokens.) Here an id is one token and a number is one token.
# To learn faster, the model gets several questions at the end of each text: half as many as there are lines.

# %%
LINES, IDS = 8, 64
texts, asked = retrieval.write_texts(LINES, 1, torch.Generator().manual_seed(0), IDS)
start, *tokens = texts[0].tolist()
for i in range(0, len(tokens), 2):
    kind = f"line {tokens[i]:>2}: REGISTER_CONTENT is " + ("" if i < 2 * LINES else "<?>   right: ")
    print(f"{kind}<{tokens[i + 1] - retrieval.IDS}>")
assert len(tokens) == 3 * LINES

# %% [markdown]
# ## The failure
#
# We train a small model on texts of up to 8 lines, and let it read longer texts. `train` is a loop over steps; we come
# to it below. It takes some seconds:

# %%
((weights, losses),) = launch(retrieval.train, 1, LINES, 200, 16, 0, IDS, device="cpu")
shares = {n: torch.tensor(retrieval.accuracy_by_depth(weights, n, 1024 // n, 0, IDS)) for n in (8, 16, 32, 64)}
longest, much_longer = shares[LINES].mean(), shares[8 * LINES].mean()
print(f"texts of {LINES} lines: {'nearly all answers are right' if longest > 0.9 else 'not learned'}")
print(f"texts of {8 * LINES} lines: {'less than half of the answers are right' if much_longer < 0.5 else 'learned'}")
assert longest > 0.9
assert much_longer < 0.5
