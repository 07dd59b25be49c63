"""What context is for, in bench/: lines found. Texts, the same training on any ring."""

from unittest import mock

import pytest
import torch
from torch import nn

from bench import retrieval
from bench.retrieval import IDS, START, VALUES, accuracy_by_depth, shard_texts, write_texts
from ringlab.models.transformer import IGNORED
from tests.attention import SEED

LINES, BATCH = 8, 3


def texts_of(lines=LINES, batch=BATCH):
    return write_texts(lines, batch, torch.Generator().manual_seed(7 + SEED))


@pytest.mark.parametrize("lines", [2, IDS])
def test_a_text_has_lines_with_ids_of_their_own_and_asks_for_half_of_them_once(lines):
    texts, asked = texts_of(lines)
    assert texts.shape == (BATCH, 1 + 3 * lines)
    assert (texts[:, 0] == START).all()
    ids, values = texts[:, 1:].unflatten(1, (-1, 2)).unbind(2)
    assert ((ids >= 0) & (ids < IDS) & (values >= IDS) & (values < IDS + VALUES)).all()
    for row in range(BATCH):
        assert len(set(ids[row, :lines].tolist())) == lines
        assert len(set(asked[row].tolist())) == lines // 2
    assert torch.equal(ids[:, lines:], ids.gather(1, asked))
    assert torch.equal(values[:, lines:], values.gather(1, asked))
    assert not torch.equal(texts[0], texts[1])
    with pytest.raises(ValueError, match=f"7 lines with {IDS} ids; expected an even number of 2 to {IDS}"):
        texts_of(7)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ranks_have_every_token_with_the_one_before_and_the_labels_of_questions(world_size):
    texts, _ = texts_of()
    seen = []
    for rank in range(world_size):
        tokens, labels, at = shard_texts(texts, rank, world_size)
        seen += at.tolist()
        assert torch.equal(tokens[..., 0], texts[:, at + 1])
        assert torch.equal(tokens[..., 1], texts[:, at])  # never the label: that comes after the token
        for i, place in enumerate(at.tolist()):
            question = place >= 2 * LINES and place % 2 == 0
            assert torch.equal(labels[:, i], texts[:, place + 2] if question else torch.full((BATCH,), IGNORED))
    assert sorted(seen) == list(range(3 * LINES))


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
    drawn = mock.patch.object(retrieval, "write_texts", side_effect=write_texts)
    with mock.patch.object(retrieval, "retriever", return_value=KnowsTheFirstHalf()), drawn as texts:
        shares = accuracy_by_depth({}, lines=16, texts=64, seed=3 + SEED)
    assert texts.call_args.args[2].initial_seed() == 1_000_003 + SEED  # no text of the training
    assert shares[:4] == [1.0] * 4
    assert all(share < 0.2 for share in shares[4:])  # 1 in VALUES by chance


def test_a_ring_takes_the_steps_of_one_process(ranks):
    one, four = (
        torch.tensor([mine for _, mine in ranks(P, retrieval.train, 16, 4, 4, SEED)]).mean(dim=0) for P in (1, 4)
    )
    assert one.shape == (4,)
    torch.testing.assert_close(four, one, rtol=1e-4, atol=0)
