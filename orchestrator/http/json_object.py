"""One JSON object of a request, read field by field: each of its type, and none that nobody reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArgument

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1
MAX_NAME_CHARACTERS = 100


class JsonObject:
    """The fields of an object; null is as good as absent. Every method raises InvalidArgument with the field's name.

    A field counts as known once it is asked for; `refuse_unknown` refuses the others.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._path = path
        self._known: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field is there."""
        return self._take(name) is not None

    def value(self, name: str) -> Any:
        """The field as it is."""
        return self._take(name)

    def string(self, name: str) -> str | None:
        """Text that can be encoded: JSON also has halves of surrogate pairs."""
        value = self._take(name)
        return None if value is None else self._text(name, value)

    def strings(self, name: str) -> list[str]:
        """One string, or a list of strings."""
        value = self._take(name)
        return [self._text(name, part) for part in (value if isinstance(value, list) else _one_or_none(value))]

    def boolean(self, name: str) -> bool | None:
        """true or false."""
        value = self._take(name)
        if value is not None and not isinstance(value, bool):
            raise self.refused(name, "must be true or false")
        return value

    def number(self, name: str) -> float | None:
        """Any number; its range is the reader's."""
        value = self._take(name)
        return None if value is None else self._number(name, value)

    def integer(self, name: str, most: int = MAX_UINT32) -> int | None:
        """A number from 0 to `most`; 5.0 is one too, since not every language tells it from 5."""
        value = self._take(name)
        return None if value is None else self._integer(name, value, most)

    def integers(self, name: str) -> list[int]:
        """A list of numbers that may be token ids."""
        return [self._integer(name, part, MAX_UINT32) for part in self.items(name)]

    def items(self, name: str) -> list[Any]:
        """A list."""
        value = self._take(name)
        if value is not None and not isinstance(value, list):
            raise self.refused(name, "must be a list")
        return value or []

    def object(self, name: str) -> JsonObject | None:
        """An object inside this one."""
        value = self._take(name)
        return None if value is None else self.object_of(name, value)

    def object_of(self, name: str, value: Any) -> JsonObject:
        """A value under this field, as an object."""
        if not isinstance(value, dict):
            raise self.refused(name, "must be an object")
        return JsonObject(value, f"{self._path}{name}.")

    def numbers_by_id(self, name: str) -> dict[int, float]:
        """An object of numbers by token id; JSON has its keys as strings."""
        value = self._take(name)
        if value is not None and not isinstance(value, dict):
            raise self.refused(name, "must be an object")
        if not all(
            key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_UINT32 for key in value or ()
        ):
            raise self.refused(name, "its names must be token ids")
        return {int(key): self._number(name, number) for key, number in (value or {}).items()}

    def choice(self, name: str, choices: Mapping[str, int]) -> int | None:
        """One of some words."""
        value = self._take(name)
        if value is not None and (not isinstance(value, str) or value not in choices):
            raise self.refused(name, f"must be one of {', '.join(choices)}")
        return choices[value] if value is not None else None

    def neutral(self, name: str, *values: Any) -> None:
        """A field that is not supported, and may only have a value that asks for nothing."""
        value = self._take(name)
        if value is not None and not any(type(value) is type(known) and value == known for known in values):
            raise self.refused(name, "is not supported")

    def refuse_unknown(self) -> None:
        """Refuses a field that was not asked for."""
        for name in sorted(self._values.keys() - self._known):
            raise self.refused(name, "is not a field of this request")

    def refused(self, name: str, problem: str) -> InvalidArgument:
        """The error for this field."""
        printable = "".join(character if character.isprintable() else "?" for character in name[:MAX_NAME_CHARACTERS])
        return InvalidArgument(f"{self._path}{printable}" or '""', problem)

    def _take(self, name: str) -> Any:
        self._known.add(name)
        return self._values.get(name)

    def _text(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.refused(name, "must be text")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise self.refused(name, "has half of a surrogate pair in its text") from None
        return value

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refused(name, "must be a number")
        try:
            return float(value)
        except OverflowError:
            raise self.refused(name, "is too large a number") from None

    def _integer(self, name: str, value: Any, most: int) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self.refused(name, f"must be a whole number from 0 to {most}")
        return value


def _one_or_none(value: Any) -> list[Any]:
    return [] if value is None else [value]
