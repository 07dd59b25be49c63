"""Views of a tensor whose numbers do not lie side by side in memory: a ring must take them as they are."""

import torch
import torch.nn.functional as F


def columns(x):
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def tokens_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_second(x):
    return torch.stack([x, x.new_full((), 9.0).expand_as(x)], dim=-1)[..., 0]


def slices(x):
    return F.pad(x, (1, 2, 3, 4), value=9.0)[:, :, 3:-4, 1:-2]


def heads_last(x):
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # F.pad keeps this order


VIEWS = [columns, tokens_first, every_second, slices, heads_last]
