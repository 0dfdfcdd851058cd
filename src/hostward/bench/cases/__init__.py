"""The cases of ``hostward bench``, one file each.

A case module has ``build(...) -> Case`` with its size as a parameter, so that tests can run the same
text on a few bytes. The ways that others take are there in the best mode that their documentation
gives, and each case also has the best that we could write by hand with torch alone.
"""

from __future__ import annotations

from hostward.bench._case import Case
from hostward.bench.cases import cast_f32_f16, gapped_permuted, hwc_1080p, one_1gib, one_4kib
from hostward.errors import OptionError

CASES: dict[str, Case] = {
    case.id: case
    for case in (one_1gib.build(), cast_f32_f16.build(), hwc_1080p.build(), gapped_permuted.build(), one_4kib.build())
}


def select(ids: list[str] | None) -> list[Case]:
    """Return the named cases in their own order, or all of them.

    Raises
    ------
    OptionError
        There is no case of that name.
    """
    unknown = [name for name in ids or () if name not in CASES]
    if unknown:
        raise OptionError(
            "unknown case",
            got=", ".join(map(repr, unknown)),
            needed=f"one of {', '.join(CASES)}",
            do="hostward bench --list says what each of them measures",
        )
    return [case for name, case in CASES.items() if not ids or name in ids]
