"""Line retrieval: texts and their shards, the same training on any ring, wrong shards rejected, and that it learns."""

import re
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bench import retrieval
from bench.retrieval import (
    IDS,
    START,
    VALUES,
    accuracy_by_depth,
    kept_by_a_step,
    retriever,
    shard_texts,
    train,
    write_texts,
)
from ringlab.models.transformer import IGNORED, summed_loss
from ringlab.training.flash_ring import scaled_dot_product_attention
from tests.attention import SEED

LINES, BATCH = 8, 3


def texts_of(lines=LINES, batch=BATCH):
    return write_texts(lines, batch, torch.Generator().manual_seed(7 + SEED))


@pytest.mark.parametrize("lines", [2, 8, 30, IDS])
def test_a_text_has_lines_with_ids_of_their_own_and_asks_for_half_of_them_once(lines):
    texts, asked = texts_of(lines)
    assert texts.shape == (BATCH, 1 + 3 * lines)
    assert (texts[:, 0] == START).all()
    ids, values = texts[:, 1:].unflatten(1, (-1, 2)).unbind(2)
    assert ((ids >= 0) & (ids < IDS)).all()
    assert ((values >= IDS) & (values < IDS + VALUES)).all()
    for row in range(BATCH):
        assert len(set(ids[row, :lines].tolist())) == lines
        assert len(set(asked[row].tolist())) == lines // 2
    assert torch.equal(ids[:, lines:], ids.gather(1, asked))
    assert torch.equal(values[:, lines:], values.gather(1, asked))
    assert not torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("lines", [0, 7, IDS + 2])
def test_other_numbers_of_lines_are_refused(lines):
    with pytest.raises(
        ValueError, match=re.escape(f"{lines} lines with {IDS} ids; expected an even number of 2 to {IDS}")
    ):
        texts_of(lines)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_ranks_have_every_token_with_the_one_before_and_the_labels_of_questions(world_size):
    texts, _ = texts_of()
    S = 3 * LINES
    seen = []
    for rank in range(world_size):
        tokens, labels, at = shard_texts(texts, rank, world_size)
        seen += at.tolist()
        assert torch.equal(tokens[..., 0], texts[:, at + 1])
        assert torch.equal(tokens[..., 1], texts[:, at])  # never the label: that comes after the token
        for i, place in enumerate(at.tolist()):
            question = place >= 2 * LINES and place % 2 == 0
            assert torch.equal(labels[:, i], texts[:, place + 2] if question else torch.full((BATCH,), IGNORED))
    assert sorted(seen) == list(range(S))


def test_the_first_half_of_an_embedding_is_of_the_token_and_the_other_half_of_the_one_before():
    embedding = retriever(F.scaled_dot_product_attention, SEED).embedding
    tokens = torch.tensor([[[5, START], [IDS, 5]]])
    half = embedding.embedding_dim // 2
    expected = torch.cat([embedding.weight[tokens[0, :, 0], :half], embedding.weight[tokens[0, :, 1], half:]], dim=1)
    assert torch.equal(embedding(tokens)[0], expected)


def chunk_by_chunk(texts, rank, world_size):
    """The token before is looked for in the rank's own chunk."""
    tokens, labels, at = shard_texts(texts, rank, world_size)
    before = F.pad(tokens[:, :-1, 0], (1, 0), value=START)
    return torch.stack([tokens[..., 0], before], dim=2), labels, at


def wrapped(texts, rank, world_size):
    """The last token, an answer, comes before the first one."""
    return shard_texts(torch.cat([texts[:, -1:], texts[:, 1:]], dim=1), rank, world_size)


def answers_asked(texts, rank, world_size):
    """The labels are one place late: what is after an answer."""
    tokens, labels, at = shard_texts(texts, rank, world_size)
    return tokens, labels.roll(1, dims=1), at


WRONG = {"token before from the chunk": chunk_by_chunk, "wrapped": wrapped, "labels late": answers_asked}


def gradients(context, shard=shard_texts):
    """The loss of a batch and every gradient, float64, summed over the ranks."""
    model = retriever(partial(scaled_dot_product_attention, layout="zigzag"), SEED).double()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    tokens, labels, at = shard(texts_of()[0], context.rank, context.world_size)
    loss = summed_loss(model(tokens, at), labels)
    loss.backward()
    results = [loss.detach(), *(weight.grad for weight in model.parameters())]
    for result in results:
        dist.all_reduce(result)
    return results


def wrong_gradients(context):
    return [gradients(context, shard) for shard in WRONG.values()]


def largest_error(results, exact):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True))


def test_loss_and_gradients_of_a_ring_are_those_of_one_process_and_wrong_shards_are_rejected(ranks):
    (exact,) = ranks(1, gradients)
    for world_size in (2, 3, 4):
        assert largest_error(ranks(world_size, gradients)[0], exact) <= 1e-10
    for name, wrong in zip(WRONG, ranks(3, wrong_gradients)[0], strict=True):
        assert largest_error(wrong, exact) > 1e-3, name


def test_a_ring_takes_the_steps_of_one_process(ranks):
    losses = {
        world_size: torch.tensor([mine for _, mine in ranks(world_size, train, 16, 6, 4, SEED)]).mean(dim=0)
        for world_size in (1, 2, 4)
    }
    assert losses[1].shape == (6,)
    for world_size in (2, 4):
        torch.testing.assert_close(losses[world_size], losses[1], rtol=1e-4, atol=0)


def test_four_times_the_lines_need_the_same_memory_on_each_rank_of_four(ranks):
    ((tokens, kept),) = ranks(1, kept_by_a_step, LINES, BATCH)
    assert tokens == BATCH * 3 * LINES
    for tokens_of_rank, kept_of_rank in ranks(4, kept_by_a_step, 4 * LINES, BATCH):
        assert tokens_of_rank == tokens
        assert abs(kept_of_rank / kept - 1) < 0.01
    ((_, without_a_ring),) = ranks(1, kept_by_a_step, 4 * LINES, BATCH)
    assert without_a_ring > 3.9 * kept


class KnowsTheFirstHalf(nn.Module):
    """Reads the values of lines in the first half of a text, and says IDS for the others."""

    def forward(self, tokens, at):
        logits = torch.zeros(*tokens.shape[:2], START + 1)
        logits[..., IDS] = 0.5
        lines = tokens.shape[1] // 3
        for row, text in enumerate(tokens[..., 0]):
            known = dict(text[:lines].view(-1, 2).tolist())
            for place, token in enumerate(text.tolist()):
                if token in known:
                    logits[row, place, known[token]] = 1.0
        return logits


def test_accuracy_is_told_by_depth():
    with mock.patch.object(retrieval, "retriever", return_value=KnowsTheFirstHalf()):
        shares = accuracy_by_depth({}, lines=16, texts=64, seed=SEED)
    assert shares[:4] == [1.0] * 4
    assert all(share < 0.2 for share in shares[4:])  # 1 in VALUES by chance
