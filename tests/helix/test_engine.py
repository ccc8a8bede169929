"""An engine on a mesh serves as on one device: requests come and go, share prefixes, are cancelled.

All drafters and families: tests/decode/test_engine_mixes.py and test_engine_families.py. Two
processes: test_hosts.py.
"""

import jax
import pytest

from jspec import helix
from tests.decode.conftest import COMPILED
from tests.decode.engines import apart, check_arrivals, engine_of, work

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")


def test_requests_that_come_and_go_get_what_they_get_alone(sharp):
    """Ragged lengths, a shared prefix, cancellations; after `warm_up` nothing compiles."""
    requests = work(10)
    expected = apart(sharp, "vegas", requests)
    sharded = helix.shard(sharp, helix.HelixConfig(kvp=2, tpa=2, block=4))
    engine = engine_of(sharded, "vegas", slots=2, prefill_chunk=64)
    engine.warm_up()
    compiled = len(COMPILED)
    check_arrivals(engine, requests, expected)
    *_, other, row = sorted(range(len(requests)), key=lambda row: len(requests[row][0]))
    prefix = requests[row][0][:-1]
    engine.share_prefix(prefix)
    before = engine.stats.prompt_tokens
    assert engine.submit(*requests[row]).result() == expected.tokens[row]
    assert engine.stats.prompt_tokens - before < len(prefix)
    engine.drop_prefix(prefix)
    # The same prompt again, after another one, starts from the slot that has it.
    pair = [engine.submit(*requests[row]) for row in (row, other)]
    engine.run()
    before = engine.stats.prompt_tokens
    pair.append(engine.submit(*requests[row]))
    engine.run()
    assert [x.tokens for x in pair] == [expected.tokens[x] for x in (row, other, row)]
    assert engine.stats.prompt_tokens - before < len(prefix)
    assert len(COMPILED) == compiled
