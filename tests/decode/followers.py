"""A drafter as a user would write it: one file, a state of its own, keys in the target's cache."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.decode.draft import Drafter
from jspec.decode.draft.autoregressive import autoregressive
from jspec.policies import Streaming
from jspec.policies.attend import SelectedAttend


@dataclasses.dataclass(frozen=True)
class Followers(Drafter):
    """What last followed the last token; the model over a window where nothing did."""

    window: int = 6

    def init(self, models, batch, capacity, max_gamma):
        return jnp.full((batch, models.target.config.vocab_size), -1, jnp.int32)

    def sync(self, models, drafter_state, tokens, lengths, max_tokens):
        valid = jnp.arange(1, tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        return extended(drafter_state, tokens, valid)

    def draft(self, models, state, gamma):
        def advance(step, token, positions, cache):
            where = jnp.where(state.beyond(positions[:, None]), -1, positions[:, None])
            view = Streaming(sinks=1, window=self.window)
            attend = SelectedAttend(where, state.cache.lengths, gamma, policy=view)
            hidden, cache = models.target(token[:, None], where, attend, cache)
            known = jnp.take_along_axis(state.draft, token[:, None], axis=1)
            certain = 50 * jax.nn.one_hot(known[:, 0], state.draft.shape[1])
            return jnp.where(known >= 0, certain, models.target.logits(hidden)[:, 0]), cache

        drafted, cache = autoregressive(state, gamma, advance, state.cache)
        return drafted, dataclasses.replace(state, cache=cache)

    def learn(self, state, target_pass, verified):
        followers = extended(state.draft, verified.tokens, verified.tokens[:, 1:] >= 0)
        return dataclasses.replace(state, draft=followers)


def extended(followers, tokens, valid):
    rows = jnp.arange(len(followers))[:, None]
    at = jnp.where(valid, tokens[:, :-1], followers.shape[1])
    return followers.at[rows, at].set(tokens[:, 1:], mode="drop")
