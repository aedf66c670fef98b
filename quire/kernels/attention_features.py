"""What a model may ask of attention beyond softmax(q k) v, and the one check of it.

Invariant: every implementation of `ops.paged_attention` calls the check, so none has an opinion of its own.
"""

from torch import Tensor


def check_features(
    q: Tensor, sliding_window: int | None, soft_cap: float | None, alibi_slopes: Tensor | None
) -> None:
    """Refuse options that mean nothing for queries [T, Hq, D].

    Raises:
        ValueError: a window below 1, a soft cap that is not above 0, or slopes that are not [Hq] floats beside q.
    """
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"paged_attention: sliding_window must be 1 or more; it is {sliding_window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"paged_attention: soft_cap must be above 0; it is {soft_cap}")
    if alibi_slopes is None:
        return
    slopes = alibi_slopes
    if slopes.shape != q.shape[1:2] or not slopes.is_floating_point() or slopes.device != q.device:
        found = f"{slopes.dtype} {list(slopes.shape)} on {slopes.device}"
        raise ValueError(
            f"paged_attention: alibi_slopes must be floats [{q.shape[1]}] on {q.device}; they are {found}"
        )
