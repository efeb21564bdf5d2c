"""The exception for mistakes of the user."""


class UserError(Exception):
    """A mistake of the user.

    The text is one line that says what is wrong, where, and the nearest valid choice. The command line prints it and exits
    with status 2. In Python code it is an ordinary exception.
    """
