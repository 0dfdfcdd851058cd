"""Take any tree of containers apart and put it together again, with a path for every leaf.

::

    flatten(tree) -> Flat             leaves in the order of the containers, nothing sorted, nothing dropped
    Flat.rebuild(new_leaves) -> tree  new containers of the same exact types around other leaves
    Flat.path(i) -> str               where leaf i stands, as Python would index it
    same_structure(a, b)              a TreeError at the first place where b is built differently

What is a container (`_kinds`): ``dict``, ``list``, ``tuple`` and ``deque`` with all their subclasses (named tuples,
``OrderedDict``, ``defaultdict``, ``Counter``, ...), ``UserDict`` and ``UserList``, dataclass instances, C's struct
sequences (``torch.return_types``, ``os.stat_result``), and what was registered with torch's pytree or optree
(`_registries`), which wins over the rest. Everything else is a leaf: ``None``, text, arrays, ``torch.Size``, enum
members, and classes as opposed to their instances.

Guarantees:

- every container comes back as a new object of the same exact type, also where no leaf of it changed;
- a container that stands in several places is one new container in those places, and its leaves are listed once;
- a tree that contains itself is refused; depth is bounded by memory only, for nothing here recurses;
- after `flatten` the caller may change the containers: keys, attributes and order are those of the call.
"""

from hostward._tree._compare import same_structure
from hostward._tree._walk import Flat, flatten

__all__ = ["Flat", "flatten", "same_structure"]
