"""A checkpoint that never touches a disk, for tests of what is in one: it checks the promises of snapshots when it is made."""

import torch

from megabucket.checkpoint.canonical import in_shape, order_of


class KeptInMemory:
    """The snapshots of all ranks, as one checkpoint."""

    path = "memory"

    def __init__(self, snapshots, step=0):
        self.step, self.world_size = step, len(snapshots)
        self.values = snapshots[0].values
        assert all(snapshot.values == self.values for snapshot in snapshots)
        self.tensors, self.flats, covered = {}, {}, {}
        for piece in (piece for snapshot in snapshots for piece in snapshot.pieces):
            info, values = piece.info, piece.values
            assert values.shape == (piece.stop - piece.start,)
            assert values.is_contiguous()
            assert str(values.dtype) == f"torch.{info.dtype}"
            assert self.tensors.setdefault(info.name, info) == info
            flat = self.flats.setdefault(info.name, torch.zeros(info.numel, dtype=values.dtype))
            flat[piece.start : piece.stop] = values.detach()
            covered.setdefault(info.name, torch.zeros(info.numel, dtype=torch.int))[piece.start : piece.stop] += 1
        assert all(bool((count == 1).all()) for count in covered.values()), "some element is there twice, or not at all"

    def whole(self, name):
        """A tensor in its shape."""
        info = self.tensors[name]
        return in_shape(self.flats[name], info.shape, info.order)

    def read(self, wanted, *, cast=False):
        """Fill the values of pieces."""
        for piece in wanted:
            whole = self.whole(piece.info.name)
            assert piece.info.shape == tuple(whole.shape)
            assert cast or piece.values.dtype == whole.dtype
            flat = whole.permute(piece.info.order).reshape(-1)
            piece.values.copy_(flat[piece.start : piece.stop])

    def bits(self):
        """Everything but random numbers, as values that compare, row-major."""
        return {
            name: (str(self.whole(name).dtype), tuple(self.whole(name).shape), order_free(self.whole(name)))
            for name in sorted(self.tensors)
            if not name.startswith("rng.")
        }


def order_free(tensor):
    assert tensor.numel() == 0 or order_of(tensor) is not None
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []
