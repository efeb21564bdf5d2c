"""The exception for mistakes of the user."""


class UserError(Exception):
    """A mistake of the user.

    The text is one line that says what is wrong, where, and the nearest valid choice. The command line prints it and exits
    with status 2. In Python code it is an ordinary exception.
    """

    def __str__(self) -> str:
        """The text; line breaks and other characters that control a terminal, which a file may hold, are escaped."""
        return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in super().__str__())
