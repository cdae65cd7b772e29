"""Derived and counted in two columns: the table that every comparison prints."""

from collections.abc import Iterable, Mapping

Section = tuple[str, Mapping[str, int], Mapping[str, int]]  # title, derived, counted


def derived_and_counted(
    head: str, sections: Iterable[Section], width: int = 30, digits: int = 12
) -> list[str]:
    """A heading, and a line for each size with both its values; what differs is pointed at."""
    lines = [f"{head:<{width}}{'derived':>{digits}}{'counted':>{digits}}"]
    for title, derived, counted in sections:
        for name, size in derived.items():
            same = "" if size == counted[name] else "   <- not the same"
            words = f"{title}: {name.replace('_', ' ')}"
            lines.append(f"{words:<{width}}{size:>{digits},}{counted[name]:>{digits},}{same}")
    return lines


def held_and_sent(
    held: Mapping[str, Mapping[str, int]], sent: Mapping[str, Mapping[str, int]]
) -> list[Section]:
    """The two sections of a comparison, from its "predicted" and "measured" sizes."""
    both = (("held", held), ("sent in a step", sent))
    return [(title, sizes["predicted"], sizes["measured"]) for title, sizes in both]


def on_the_wire(num_bytes: int | None, reason: str | None) -> str:
    """What the loopback carried for each rank in a step, or why that was not counted."""
    counted = num_bytes is not None
    said = f"{num_bytes:,} bytes per rank and step" if counted else f"not counted, as {reason}"
    return f"on the wire, packet headers included: {said}"
