"""What lies in an object store after saves: shared by the tests of commits in memory and on a server."""

from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.objects.folder import ObjectFolder
from torchtitan_ext.storage.objects.leftovers import LeftSave, left_saves, store_time


def left_at(url: str, grace_seconds: float = 3600.0) -> list[LeftSave]:
    """What dead and replaced saves left, by the store's clock."""
    return left_saves(Location(url), store_time(Location(url)), grace_seconds)


def names_at(url: str) -> set[str]:
    """The names of all objects below it."""
    return set(ObjectFolder(Location(url)).stamps())
