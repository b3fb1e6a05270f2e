import numpy as np
import pytest

from scripts.nano.ngram import NGram, bits_per_byte, grams

TEXT = b"the cat sat on the mat and the dog sat on the cat. " * 3 + b"a bird sang in the tree, and the cat heard it."


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("context", [b"the ", b"zzzz", b"\f\f\f\f", b"e ca", b" and"])
def test_the_probabilities_of_the_next_byte_sum_to_one(order, context):
    model = NGram(TEXT, order)
    every = np.concatenate([grams(context + bytes([byte]), order)[-1:] for byte in range(256)])
    probabilities = model.probability(every)
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)
    assert probabilities.min() > 0


def test_grams_hold_the_bytes_before_each_position():
    assert [hex(key) for key in grams(b"abc", 2)] == ["0xc61", "0x6162", "0x6263"]


def test_similar_text_costs_less_than_other_text_and_than_eight_bits():
    near = bits_per_byte(TEXT, b"the dog sat on the mat")
    far = bits_per_byte(TEXT, b"XQ#9~ \x80\x81 JJ")
    assert near < 2 < 7 < far
    assert NGram(TEXT, 5).bits_per_byte(TEXT) < NGram(TEXT, 1).bits_per_byte(TEXT) < 8


def test_smoothing_is_that_of_kneser_and_ney():
    """Two letters by hand: `ab` twice, `ac` once, `bd` once; discount 2 / (2 + 2 * 1)."""
    model = NGram(b"abxabyac", 2)
    seen = model.probability(grams(b"ab", 2)[-1:])[0]
    pairs = {b"\fa", b"ab", b"bx", b"xa", b"by", b"ya", b"ac"}
    after = {byte: sum(pair[1] == byte for pair in pairs) for byte in {pair[1] for pair in pairs}}
    counts = {pair: (b"\f" + b"abxabyac").count(pair) for pair in pairs}

    def discount(values):
        once, twice = sum(v == 1 for v in values), sum(v == 2 for v in values)
        return once / (once + 2 * twice)

    low, high = discount(list(after.values())), discount(list(counts.values()))
    single = (after[ord("b")] - low + low * len(after) / 256) / len(pairs)
    assert seen == pytest.approx((2 - high + high * 2 * single) / 3, rel=1e-12)
