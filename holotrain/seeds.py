"""A random seed from several numbers."""


def mixed_seed(*numbers: int) -> int:
    """A 63-bit seed from several numbers. Close inputs give unrelated seeds (finalizer of splitmix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1
