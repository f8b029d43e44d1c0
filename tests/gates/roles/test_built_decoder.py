"""Roles of a decoder whose heads are known, and of the same one with its weights or its tokens shuffled."""

import pytest

from tests.gates.roles.built_decoder import BUILT, DecoderWeights, built_decoder, named, roles_of


@pytest.fixture(scope="module")
def roles():
    return roles_of(built_decoder())


def test_each_head_has_the_role_it_was_built_for(roles):
    assert named(roles) == BUILT
    found = {role.rule.name: role for role in roles}
    assert found["positional"].column[0] == "-1"
    for name, head in (("positional", 0), ("duplicate", 1), ("induction", 5)):
        assert found[name].strength[head] == 1
    for name, heads in (("induction", [0, 1, 2, 3, 4]), ("duplicate", [0, 2, 3, 4, 5])):
        assert found[name].strength[heads].max() < 0.2


def test_the_induction_head_needs_what_the_previous_token_head_writes():
    weights = DecoderWeights(60, 65)
    model = weights.write()
    weights.parts(0, 0)[3].zero_()
    assert named(roles_of(model), background=False) == [*BUILT[:5], []]


def test_shuffled_weights_have_no_role():
    weights = DecoderWeights(60, 65)
    model = weights.write()
    weights.shuffle()
    assert named(roles_of(model), background=False) == [[]] * 6


def test_shuffled_tokens_leave_the_head_that_looks_at_places_alone(roles):
    assert named(roles_of(built_decoder(), shuffled=True), background=False) == [["positional"], [], [], [], [], []]
