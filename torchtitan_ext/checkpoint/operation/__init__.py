"""One ``tte.save`` or ``tte.load``: arguments, phases on all ranks, components, copies, steps of a run."""
