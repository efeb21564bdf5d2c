"""The covering design that thins the matrices of other tests."""

from itertools import combinations, product

from covering import pairwise, thinned

OPTIONS = ["a", "b", "c"], [1, 2], [False, True], [{"x": 1}, {"x": 2}]


def pairs(cases):
    return {str(pair) for case in cases for pair in combinations(enumerate(case), 2)}


def test_every_pair_of_values_occurs_in_few_cases():
    cases, matrix = pairwise(*OPTIONS), list(product(*OPTIONS))
    assert pairs(cases) == pairs(matrix)
    assert len(cases) <= 8 < len(matrix) == 24


def test_only_cases_that_may_be_are_chosen_and_all_of_those_are_kept():
    def allowed(letter, number, *rest):
        return letter == "a" or number == 1

    matrix = [case for case in product(*OPTIONS) if allowed(*case)]
    assert pairs(pairwise(*OPTIONS, allowed=allowed)) == pairs(matrix)
    found = thinned(*OPTIONS, allowed=allowed)
    assert [parameters.values for parameters in found] == matrix
    assert [p.values for p in found if not p.marks] == pairwise(*OPTIONS, allowed=allowed)
