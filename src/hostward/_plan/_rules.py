"""From descriptions to moves: the rules, and nothing about the state of any machine.

They come from measurements (docs/adr/0004): narrow and reorder on the device, widen on the host where that is exact,
move a dense source as it lies, a broadcast one by its base, and what overlaps once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from hostward import _dtypes, _layout
from hostward._plan._records import Deliver, Move, Plan, Route, View, Way
from hostward._types import Capabilities, CopyMode, Memory, Options, Order, Source
from hostward.errors import CopyNeededError, DtypeError

# Largest leaf that takes the caller's own stream into ordinary memory: its copy out of the pinned granule costs less
# than the events of a second stream.
DIRECT_NBYTES = 64 << 10  # also the largest that shares a pinned granule with others

CapabilityTable = tuple[tuple[str, Capabilities], ...]  # by device type; hashable, it is part of the cache's key


@lru_cache(maxsize=256)
def make_plan(sources: tuple[Source, ...], options: Options, capabilities: CapabilityTable) -> Plan:
    """Decide how every leaf moves.

    Parameters
    ----------
    sources
        One description for each distinct leaf. Together with the others this is the whole key of the cache:
        the result may depend on nothing else.
    options
        The call's options, normalised.
    capabilities
        What the device types that occur can do.

    Raises
    ------
    CopyNeededError, DtypeError
        With the number of the leaf; the caller knows its path.
    """
    able = dict(capabilities)
    for leaf, source in enumerate(sources):
        _check_dtype(leaf, source, options)
    moves: list[Move] = []
    delivers: list[Deliver | None] = [None] * len(sources)
    for members, span in _shared_spans(sources, options, able):
        _move_span(sources, options, members, span, moves, delivers)
    for leaf, source in enumerate(sources):
        if delivers[leaf] is None:
            delivers[leaf] = _one_leaf(leaf, source, options, able, moves)
    done = tuple(deliver for deliver in delivers if deliver is not None)
    direct_ok = len(sources) == 1 and not options.out and done[0].way is Way.FLAT and moves[0].span is None
    routes = tuple(_routes(move, options, able[_device_type(move.device)], direct_ok, sources) for move in moves)
    return Plan(sources, options, tuple(moves), done, routes)


def _check_dtype(leaf: int, source: Source, options: Options) -> None:
    if source.device == "numpy" and source.dtype not in _dtypes.TABLE:
        if options.bare and options.request.plain is not None:
            raise DtypeError(
                f"cannot cast {source.dtype} to {options.request.plain.name}",
                leaf=leaf,
                why="torch has no such dtype, so there is no cast to follow",
                do=f"pass x.astype({options.request.plain.name!r})",
            )
        return  # structured, datetime, object, swapped bytes: copied as it is
    dtype, target = _dtypes.lookup(source.dtype), _target(source, options)
    error = _dtypes.cast_error(dtype, target)
    if error is None and target.refusal is not None:
        error = DtypeError(f"NumPy has no dtype for torch.{target.name}", why=target.why, do=target.refusal)
    if error is not None:
        error.leaf = leaf
        raise error


def _device_type(device: str) -> str:
    return device.partition(":")[0]


def _is_host(source: Source, able: Mapping[str, Capabilities]) -> bool:
    return source.device == "numpy" or able[_device_type(source.device)].host


def _target(source: Source, options: Options) -> _dtypes.DType:
    return options.request.target(_dtypes.lookup(source.dtype), bare=options.bare)


def _routes(
    move: Move, options: Options, capable: Capabilities, direct_ok: bool, sources: tuple[Source, ...]
) -> tuple[Route, ...]:
    if not capable.async_copies:
        return (Route.BLOCKING,)
    as_delivered = direct_ok and move.dtype == _target(sources[move.leaf], options).name
    if as_delivered and (move.nbytes <= DIRECT_NBYTES or options.memory is Memory.PINNED):
        first = Route.DIRECT
    else:
        first = Route.WHOLE
    return (first, Route.PIECES) if move.passes else (first,)


# --- one leaf by itself ---------------------------------------------------------------------------------------------


def _one_leaf(
    leaf: int, source: Source, options: Options, able: Mapping[str, Capabilities], moves: list[Move]
) -> Deliver:
    if _is_host(source, able):
        return _on_host(leaf, source, options)
    if options.copy is CopyMode.NEVER:
        raise CopyNeededError(
            "copy=False cannot be kept",
            leaf=leaf,
            got=f"a tensor on {source.device}",
            why="an array in host memory cannot share a device's memory",
            do="copy=None shares only the leaves that are in host memory already",
        )
    dtype, target = _dtypes.lookup(source.dtype), _target(source, options)
    keep_order = options.order is Order.K
    nbytes = _layout.numel(source.shape) * target.itemsize
    if nbytes == 0:
        return Deliver(leaf, Way.EMPTY, target.name, source.shape, source.shape, 0)
    drop = _layout.broadcast_dims(source.shape, source.strides)
    shape, strides = _without(source.shape, drop), _without(source.strides, drop)
    perm = _layout.k_order(shape, strides) if keep_order else tuple(range(len(shape)))
    shape, strides = tuple(shape[p] for p in perm), tuple(strides[p] for p in perm)
    link = _link_dtype(source, dtype, target)
    passes = _passes(source, dtype, link, shape, strides)
    notes = _notes(source, dtype, target, link, drop)
    landed = _layout.numel(shape) * link.itemsize
    moves.append(Move(source.device, leaf, shape, link.name, landed, drop=drop, perm=perm, passes=passes, notes=notes))
    move = len(moves) - 1
    if drop and not keep_order:
        view = View(link.name, 0, source.shape, _repeat(source.shape, drop))
        return Deliver(leaf, Way.GATHER, target.name, source.shape, source.shape, nbytes, move=move, view=view)
    moves[move] = replace(moves[move], lands_in=leaf)
    axes = _axes(perm)
    if drop:
        small = _layout.numel(shape) * target.itemsize
        note = (f"read-only: repeats {small:,} bytes",)
        return Deliver(leaf, Way.BROADCAST, target.name, source.shape, shape, small, axes=axes, move=move, notes=note)
    return Deliver(leaf, Way.FLAT, target.name, source.shape, shape, nbytes, axes=axes, move=move)


def _link_dtype(source: Source, dtype: _dtypes.DType, target: _dtypes.DType) -> _dtypes.DType:
    """Return the dtype that crosses: the smaller one, if the host can widen it exactly."""
    if source.neg:  # torch forgets the sign where it copies a negative view into some other dtypes (2.13, CPU)
        return dtype
    if target.itemsize > dtype.itemsize and _dtypes.is_exact_cast(dtype, target):
        return dtype
    return target


def _passes(
    source: Source, dtype: _dtypes.DType, link: _dtypes.DType, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[str, ...]:
    found = []
    if source.conj:
        found.append("resolve conj")
    if source.neg:
        found.append("resolve neg")
    if link.name != dtype.name:
        found.append(f"cast {dtype.name} to {link.name}")
    if not _layout.is_contiguous(shape, strides):
        found.append("transpose" if _layout.is_dense(shape, strides) else "pack")
    return tuple(found)


def _notes(
    source: Source, dtype: _dtypes.DType, target: _dtypes.DType, link: _dtypes.DType, drop: tuple[int, ...]
) -> tuple[str, ...]:
    notes = []
    if link.name != target.name:
        how = "widened to {}, exactly," if _dtypes.is_exact_cast(link, target) else "cast to {}"
        notes.append(f"{how.format(target.name)} on the host")
    if drop:
        notes.append(f"broadcast dimensions {drop} cross once")
    if source.requires_grad:
        notes.append("gradient dropped")
    return tuple(notes)


def _repeat(shape: tuple[int, ...], drop: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that spread a landing without the dimensions `drop` over `shape`."""
    inner = iter(_layout.contiguous_strides(_without(shape, drop)))
    return tuple(0 if dim in drop else next(inner) for dim in range(len(shape)))


def _without(sizes: tuple[int, ...], drop: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for dim, size in enumerate(sizes) if dim not in drop)


def _axes(perm: tuple[int, ...]) -> tuple[int, ...]:
    """Return the transpose that undoes `perm`; ``()`` where there is nothing to undo."""
    if perm == tuple(range(len(perm))):
        return ()
    inverse = [0] * len(perm)
    for new, old in enumerate(perm):
        inverse[old] = new
    return tuple(inverse)


def _on_host(leaf: int, source: Source, options: Options) -> Deliver:
    """Plan a leaf that is in host memory: shared where the caller allows it and nothing has to change."""
    if source.device == "numpy" and source.dtype not in _dtypes.TABLE:
        target_name, itemsize, cast = source.dtype, 0, False  # structured, datetime, object: never cast
    else:
        target = _target(source, options)
        target_name, itemsize, cast = target.name, target.itemsize, target.name != source.dtype
    keep = options.order is Order.K
    changes = []
    if cast:
        changes.append(f"a cast from {source.dtype} to {target_name}")
    if source.conj or source.neg:
        changes.append("a conjugate or negative view has to be resolved")
    if not keep and not _layout.is_contiguous(source.shape, source.strides):
        changes.append("the source is not C-contiguous")
    nbytes = _layout.numel(source.shape) * itemsize
    notes = ("gradient dropped",) if source.requires_grad else ()
    if options.copy is not CopyMode.ALWAYS and not changes and not options.out:
        return Deliver(leaf, Way.HOST_SHARE, target_name, source.shape, source.shape, nbytes, notes=notes)
    if options.copy is CopyMode.NEVER:
        raise CopyNeededError(
            "copy=False cannot be kept",
            leaf=leaf,
            why=" and ".join(changes) or "out= was given",
            do="copy=None, or order='K' and no dtype= to take the leaf as it is",
        )
    if keep and not options.out:
        # K order of a broadcast source is a read-only view of its base, as for a device leaf.
        drop = _layout.broadcast_dims(source.shape, source.strides)
        shape, strides = _without(source.shape, drop), _without(source.strides, drop)
        perm = _layout.k_order(shape, tuple(map(abs, strides)))
        base = tuple(shape[p] for p in perm)
        axes = _axes(perm)
        small = _layout.numel(base) * itemsize
        return Deliver(leaf, Way.HOST_COPY, target_name, source.shape, base, small, axes=axes, notes=notes)
    return Deliver(leaf, Way.HOST_COPY, target_name, source.shape, source.shape, nbytes, notes=notes)


# --- leaves that share bytes ----------------------------------------------------------------------------------------


def _shared_spans(
    sources: tuple[Source, ...], options: Options, able: Mapping[str, Capabilities]
) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """Find leaves whose bytes overlap and that together cross the link more cheaply, as one byte range.

    A group qualifies where no member needs a device pass other than packing, the host needs no transpose, and the
    range is no longer than what the members would move one by one.
    """
    by_storage: dict[tuple[str, int], list[int]] = {}
    for leaf, source in enumerate(sources):
        if not _is_host(source, able) and _can_share(source, options):
            by_storage.setdefault((source.device, source.storage), []).append(leaf)
    found = []
    for leaves in by_storage.values():
        ranges = [_byte_range(sources[leaf]) for leaf in leaves]
        for group in _layout.union_groups(ranges):
            members = tuple(leaves[member] for member in group.members)
            # Members of several item sizes: each must find its elements aligned within what lands.
            start = group.start - group.start % max(_dtypes.lookup(sources[leaf].dtype).itemsize for leaf in members)
            nbytes, alone = group.stop - start, sum(_alone_nbytes(sources[leaf]) for leaf in members)
            if nbytes < alone or (nbytes == alone and len(members) > 1):
                found.append((members, (start, group.stop)))
    return found


def _can_share(source: Source, options: Options) -> bool:
    if source.conj or source.neg or options.copy is CopyMode.NEVER or 0 in source.shape:
        return False
    dtype = _dtypes.lookup(source.dtype)
    if _link_dtype(source, dtype, _target(source, options)) is not dtype:
        return False  # a cast on the device makes bytes of its own
    if options.order is Order.K:
        return not _layout.broadcast_dims(source.shape, source.strides)  # that one moves its base alone
    moved = [(n, s) for n, s in zip(source.shape, source.strides, strict=True) if n != 1 and s != 0]
    return all(a[1] >= b[1] for a, b in pairwise(moved))  # else the host would transpose


def _byte_range(source: Source) -> tuple[int, int]:
    return _layout.byte_range(source.offset, source.shape, source.strides, _dtypes.lookup(source.dtype).itemsize)


def _alone_nbytes(source: Source) -> int:
    """Return the bytes that the leaf would move by itself."""
    drop = _layout.broadcast_dims(source.shape, source.strides)
    return _layout.numel(_without(source.shape, drop)) * _dtypes.lookup(source.dtype).itemsize


def _move_span(
    sources: tuple[Source, ...],
    options: Options,
    members: tuple[int, ...],
    span: tuple[int, int],
    moves: list[Move],
    delivers: list[Deliver | None],
) -> None:
    """Move one byte range and give every member its own array out of it."""
    nbytes = span[1] - span[0]
    owner = next((leaf for leaf in members if _fills(sources[leaf], options, span)), None)
    note = f"{len(members)} overlapping leaves cross once" if len(members) > 1 else "overlapping windows cross once"
    first = members[0]
    moves.append(
        Move(sources[first].device, first, (nbytes,), "uint8", nbytes, span=span, lands_in=owner, notes=(note,))
    )
    move = len(moves) - 1
    for leaf in members:
        source = sources[leaf]
        dtype, target = _dtypes.lookup(source.dtype), _target(source, options)
        size = _layout.numel(source.shape) * target.itemsize
        notes = ("gradient dropped",) if source.requires_grad else ()
        if leaf == owner:
            delivers[leaf] = Deliver(
                leaf, Way.FLAT, target.name, source.shape, source.shape, size, move=move, notes=notes
            )
            continue
        perm = tuple(range(len(source.shape)))
        if options.order is Order.K:
            perm = _layout.k_order(source.shape, source.strides)
        base = tuple(source.shape[p] for p in perm)
        view = View(
            dtype.name,
            _byte_range(source)[0] - span[0],
            base,
            tuple(source.strides[p] for p in perm),
        )
        axes = _axes(perm)
        delivers[leaf] = Deliver(
            leaf, Way.GATHER, target.name, source.shape, base, size, axes=axes, move=move, view=view, notes=notes
        )


def _fills(source: Source, options: Options, span: tuple[int, int]) -> bool:
    """Say whether the leaf's own result can be the landing place of the whole range."""
    plain = _target(source, options).name == source.dtype and not options.out
    return plain and _layout.is_contiguous(source.shape, source.strides) and _byte_range(source) == span
