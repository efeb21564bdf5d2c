"""The one exception that is the user's to mend."""


class UserError(Exception):
    """A mistake of the user's.

    Its text is one line that says what is wrong, where, and the nearest valid choice. The command line prints it and exits
    with status 2; used as a library, it is an ordinary exception.
    """
