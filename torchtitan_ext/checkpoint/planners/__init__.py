"""The planners for ``dcp.save`` and ``dcp.load``: metadata, items, targets, and what is kept between saves."""
