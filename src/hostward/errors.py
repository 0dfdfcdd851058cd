"""Every exception and warning that hostward raises.

::

    HostwardError
    ├── OptionError            (ValueError)    an option's value is not one of those documented
    ├── LeafError              (TypeError)     a leaf cannot become a NumPy array as it is
    │   └── DtypeError                         ... because of its dtype or the dtype asked for
    ├── TreeError              (ValueError)    a cycle, or two trees whose structures differ
    ├── OutputError            (ValueError)    ``out=`` does not fit the result
    ├── CopyNeededError        (ValueError)    ``copy=False``, and the bytes have to move
    ├── CaptureError           (RuntimeError)  called while a CUDA graph is being captured
    ├── HostMemoryError        (MemoryError)   the result does not fit into host memory
    ├── DeviceMemoryError      (MemoryError)   no route fits into the device's free memory
    ├── TransferError          (RuntimeError)  the device failed while the copy was under way
    └── MissingDependencyError (ImportError)   an optional part is not installed

    HostwardWarning            (UserWarning)
    └── HostwardResourceWarning (ResourceWarning)  an error where nothing could be raised

Texts follow one grammar: *what* happened (call, leaf path, got, needed), *why*, *what to do*.
The fields are on the exception; the text is built from them.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "CopyNeededError",
    "DeviceMemoryError",
    "DtypeError",
    "HostMemoryError",
    "HostwardError",
    "HostwardResourceWarning",
    "HostwardWarning",
    "LeafError",
    "MissingDependencyError",
    "OptionError",
    "OutputError",
    "TransferError",
    "TreeError",
]


class HostwardError(Exception):
    """Base of all errors.

    Parameters
    ----------
    what
        What happened, one clause, no full stop.
    path
        The leaf's path in the caller's tree, as Python would index it (``"['loss']"``,
        ``".logits"``); ``""`` for a bare leaf, ``None`` where no leaf is concerned.
    got, needed
        What was found and what was expected, where that adds something.
    why, do
        The reason, and the line that gets the caller further.
    call
        The public function; filled in at the edge (`located`).
    leaf
        The leaf's number, where the raiser knows no paths (the planner); the edge turns it into `path`.
    """

    def __init__(
        self,
        what: str,
        *,
        path: str | None = None,
        got: str | None = None,
        needed: str | None = None,
        why: str | None = None,
        do: str | None = None,
        call: str | None = None,
        leaf: int | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.path = path
        self.got = got
        self.needed = needed
        self.why = why
        self.do = do
        self.call = call
        self.leaf = leaf

    def located(self, *, call: str | None = None, path: str | None = None) -> HostwardError:
        """Fill in the call or the path where the raiser did not know them; return the error."""
        self.call = self.call or call
        self.path = path if self.path is None else self.path
        return self

    def __str__(self) -> str:
        head = f"{self.call}: {self.what}" if self.call else self.what
        if self.path:
            head += f" (at tree{self.path})"
        facts = [f"{label} {text}" for label, text in (("got", self.got), ("needed", self.needed)) if text]
        lines = [": ".join([head, ", ".join(facts)]) if facts else head]
        lines += [f"  {label}: {text}" for label, text in (("why", self.why), ("do", self.do)) if text]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only fields: without this an error does not survive pickling (worker processes).
        return (_rebuild, (type(self), self.what, dict(self.__dict__)))


def _rebuild(cls: type[HostwardError], what: str, fields: dict[str, object]) -> HostwardError:
    error = cls(what)
    error.__dict__.update(fields)
    return error


class OptionError(HostwardError, ValueError):
    """An option's value is not one of those documented."""


class LeafError(HostwardError, TypeError):
    """A leaf cannot become a NumPy array as it is."""


class DtypeError(LeafError):
    """A leaf's dtype, or the dtype asked for, has no NumPy counterpart or no defined cast."""


class TreeError(HostwardError, ValueError):
    """A cycle, or two trees whose structures differ."""


class OutputError(HostwardError, ValueError):
    """``out=`` does not fit the result."""


class CopyNeededError(HostwardError, ValueError):
    """``copy=False`` was asked for, and the bytes have to move."""


class CaptureError(HostwardError, RuntimeError):
    """Called while a CUDA graph is being captured on the source's stream."""


class HostMemoryError(HostwardError, MemoryError):
    """The result does not fit into host memory."""


class DeviceMemoryError(HostwardError, MemoryError):
    """No route fits into the device's free memory and the limit for temporaries."""


class TransferError(HostwardError, RuntimeError):
    """The device reported an error while the copy was under way; nothing was returned."""


class MissingDependencyError(HostwardError, ImportError):
    """An optional part is not installed; ``do`` holds the line to paste."""


class HostwardWarning(UserWarning):
    """Base of all warnings."""


class HostwardResourceWarning(HostwardWarning, ResourceWarning):
    """Something went wrong where nothing can be raised: a finaliser, a callback, interpreter exit."""
