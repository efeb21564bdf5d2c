"""Mistakes of the user, each in one line: which option, what is wrong, what is valid."""

import difflib
import re
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from errno import EACCES, ELOOP, ENAMETOOLONG, EPERM


def printable(text: str) -> str:
    """A text in which line breaks and other characters that control a terminal are escaped: names of files may hold any."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


_CONTROLS = re.compile("\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Of a terminal and of the direction of text, without tabs, ends of lines, and the marks that Arabic and Hebrew need beside
punctuation, which turn no letters around."""


def readable(text: str) -> str:
    """A text of several lines, or names that are to stay as they are, with only what controls a terminal escaped."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class UserError(Exception):
    """A mistake of the user.

    The text is one line that says what is wrong, where, and the nearest valid choice. The command line prints it and exits
    with status 2. In Python code it is an ordinary exception.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with the nearest choice, or an empty string."""
    choices = list(choices)
    near = difflib.get_close_matches(word, choices, 1, 0.5)
    near += [choice for choice in choices if choice == _initials(word) or word == _initials(choice)]  # lr for learning_rate
    near += [choice for choice in choices if word and choice.startswith(word)]  # 4 for 4bit
    return f" Did you mean {near[0]!r}?" if near else ""


def _initials(name: str) -> str:
    return "".join(part[:1] for part in name.split("_"))


def check_choice(where: str, value: str | None, choices: Iterable[str]) -> None:
    choices = list(choices)
    if value not in choices:
        raise UserError(f"{where}: {value!r} is not one of {', '.join(choices)}.{did_you_mean(str(value), choices)}")


@contextmanager
def files_named() -> Generator[None]:
    """Turns an OSError inside into a UserError, if only a name that the user gave, or rights, can be its cause."""
    try:
        yield
    except OSError as error:
        if error.filename is None or error.errno not in (ENAMETOOLONG, ELOOP, EACCES, EPERM):
            raise
        raise UserError(f"{error.filename}: {error.strerror or error}") from error


@contextmanager
def as_user_error(group: str, options: Collection[str] = (), elsewhere: Mapping[str, str] | None = None) -> Generator[None]:
    """Turns a ValueError inside into a UserError about this configuration group.

    Args:
        options: those of the group. If the message begins with the name of one, the error is about ``group.name``, as the user
            writes it.
        elsewhere: the keys of options of other groups, by the names that messages begin with.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(
            _about(group, {name: f"{group}.{name}" for name in options} | dict(elsewhere or {}), str(error))
        ) from error


def _about(group: str, keys: Mapping[str, str], text: str) -> str:
    name = re.split(r"\W", text, maxsplit=1)[0]
    sign, rest = text[len(name) : len(name) + 1], text[len(name) + 1 :]
    if name not in keys or sign not in " =:" or rest.startswith(("and ", "or ")):  # about several, or about none
        return f"{group}: {text}"
    return f"{keys[name]}: {rest}" if sign == " " else f"{keys[name]}{sign}{rest}"
