"""Thin adapters to what trains: each its own module, imported by nothing here, over a package that may be absent.

``install`` needs torch alone.
"""

from torchtitan_ext.integrations.install import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
