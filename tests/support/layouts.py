"""Layouts for tests of pictures: who holds what on meshes of several sizes."""

from torchtitan_ext.cli.pictures.holders import Holders


def sharded_2d(num_dp: int, num_tp: int, rows: int, cols: int) -> Holders:
    """Rows cut along dp, columns along tp, evenly; ranks count tp first."""
    height, width = rows // num_dp, cols // num_tp
    return {
        dp * num_tp + tp: (((dp * height, tp * width), (height, width)),)
        for dp in range(num_dp)
        for tp in range(num_tp)
    }


def strided(num_ranks: int, num_boxes: int, rows: int, cols: int) -> Holders:
    """Each rank holds several boxes of rows, as with an interleaved fused QKV."""
    height = rows // (num_ranks * num_boxes)
    return {
        rank: tuple((((box * num_ranks + rank) * height, 0), (height, cols)) for box in range(num_boxes))
        for rank in range(num_ranks)
    }
