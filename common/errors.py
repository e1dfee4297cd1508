"""The one exception meant for people: a message without a traceback."""


class UserError(ValueError):
    """Something the user can mend: the message names what was seen, what was wanted and what to do next.

    Entry scripts print it as one `error:` line and exit with code 2. Broken promises of our own code are
    assertions instead, so that they keep their traceback.
    """
