import json

import pytest

from driftgym.envs.spaces import Unicode, is_scalar_text, scalar_text


@pytest.mark.parametrize("text", ["", "How old is Ada?", 'Zürich "HB"\n\t', "Łódź 🧪 \x00", "a" * 50])
def test_holds_ordinary_texts(text):
    assert Unicode(max_length=50).contains(text)
    assert text in Unicode(max_length=50)


@pytest.mark.parametrize("thing", ["a" * 51, "\ud800", b"a", 1, None, ["a"]])
def test_holds_nothing_else(thing):
    assert not Unicode(max_length=50).contains(thing)


def test_samples_are_seeded_and_within():
    space, same, other = (Unicode(max_length=20, seed=seed) for seed in (1, 1, 2))
    samples = [space.sample() for _ in range(200)]
    assert samples == [same.sample() for _ in range(200)]
    assert samples != [other.sample() for _ in range(200)]
    assert all(space.contains(sample) for sample in samples)
    assert {len(sample) for sample in samples} == set(range(21))
    assert any(ord(character) > 0xFFFF for sample in samples for character in sample)


def test_sample_takes_no_mask():
    with pytest.raises(ValueError, match="mask"):
        Unicode().sample(mask=1)


def test_equality_and_json():
    space = Unicode(max_length=9)
    assert space == Unicode(max_length=9)
    assert hash(space) == hash(Unicode(max_length=9))
    assert space != Unicode(max_length=8)
    assert space != "Unicode"
    texts = ["é", "🧪"]
    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(texts)))) == texts


def test_no_length_is_refused():
    with pytest.raises(ValueError, match="max_length"):
        Unicode(max_length=0)


def test_lone_surrogates_are_replaced():
    assert not is_scalar_text("a\udc00")
    assert scalar_text("a\udc00b🧪") == "a\N{REPLACEMENT CHARACTER}b🧪"
    assert scalar_text("plain") == "plain"
