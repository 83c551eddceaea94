import math

import pytest
import torch

from dflash_ext.layout import BlockLayout


def test_dflash_block():
    layout = BlockLayout(5)
    assert layout.num_proposals == 4
    assert layout.label_offsets().tolist() == [0, 1, 2, 3, 4]
    assert layout.predecessor_offsets().tolist() == [-1, 0, 1, 2, 3]
    assert layout.loss_slots().tolist() == [False, True, True, True, True]
    ids = layout.input_ids(torch.tensor([7, 9]), 99)
    assert ids.tolist() == [[7, 99, 99, 99, 99], [9, 99, 99, 99, 99]]
    assert layout.positions(torch.tensor([3, 0])).tolist() == [[3, 4, 5, 6, 7], [0, 1, 2, 3, 4]]


def test_decay_starts_at_the_first_loss_slot():
    decay = BlockLayout(4).decay(2.0)
    assert decay.dtype == torch.float32
    want = torch.tensor([0.0, 1.0, math.exp(-0.5), math.exp(-1.0)])
    torch.testing.assert_close(decay, want)


def test_shifted_block_predicts_from_its_anchor():
    layout = BlockLayout(4, shift=1)
    assert layout.num_proposals == 4
    assert layout.label_offsets().tolist() == [1, 2, 3, 4]
    assert layout.predecessor_offsets().tolist() == [0, 1, 2, 3]
    assert layout.loss_slots().all()
    torch.testing.assert_close(layout.decay(4.0), torch.exp(-torch.arange(4.0) / 4))


def test_visible_prefix():
    layout = BlockLayout(5, prefix=2)
    assert layout.input_ids(torch.tensor([[5, 6]]), 0).tolist() == [[5, 6, 0, 0, 0]]
    assert layout.loss_slots().tolist() == [False, False, True, True, True]
    assert layout.decay(1.0)[2] == 1.0
    assert layout.num_proposals == 3


@pytest.mark.parametrize("size", [2, 16, 32])
def test_as_many_proposals_as_loss_slots(size):
    for shift in (0, 1):
        layout = BlockLayout(size, shift=shift)
        assert layout.num_proposals == int(layout.loss_slots().sum()) == size - 1 + shift


@pytest.mark.parametrize("wrong", [{"size": 1}, {"size": 4, "shift": 2}, {"size": 4, "prefix": 4}])
def test_impossible_blocks_are_refused(wrong):
    with pytest.raises(ValueError, match="want"):
        BlockLayout(**wrong)
