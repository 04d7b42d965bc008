"""Transfers of what changed: what is kept of an earlier version, what differs from it, and how that travels.

``kept`` compares versions of tensors. ``changes`` has what a ``delta.Snapshot`` finds in a state, ``sent_boxes`` what a
plan finds in the boxes that it sends; ``changed_boxes`` sends either. ``sent_sums`` proves what casts and maps change.
"""
