"""Every trait of a decoder is known to the native kernels, or is settled before they see it."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import pytest

from paceline.backends.native.cpu import CpuOps
from paceline.backends.native.native import native_module, why_not_native
from paceline.models.decoder import Decoder
from tests.arrays import arrays
from tests.toy import TOY, toy_tensors

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason="no native kernels")

SETTLED = {
    # Which weights a layer has says it too.
    "attention": {"qkv_bias", "o_bias", "qk_norm", "qk_norm_bare", "value_norm", "sinks", "latent"},
    "mlp": {"bias", "learnt", "experts"},
    "norms": {"before", "after", "by_kind", "shared", "plus_one", "bias"},
    "multipliers": set[str](),
}


def recording(part: Any, read: set[str]) -> Any:
    """The same part of a configuration; the names that are looked up go into ``read``."""

    class Recording(type(part)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    return Recording(**{field.name: getattr(part, field.name) for field in fields(part)})


SHAPE = replace(TOY, attention=replace(TOY.attention, sliding_window=8))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(SHAPE, arrays(toy_tensors()), CpuOps("float32"), SHAPE.max_position)


@pytest.mark.parametrize("name", SETTLED)
def test_a_trait_that_the_kernels_do_not_read_is_settled_before(
    decoder: Decoder, name: str
) -> None:
    read = set[str]()
    seen = copy.copy(decoder)
    part = getattr(SHAPE, name)
    seen.config = replace(SHAPE, **{name: recording(part, read)})
    native_module().Decoder(seen)
    assert {field.name for field in fields(part)} - read == SETTLED[name]


def test_a_name_that_a_decoder_lacks_is_refused(decoder: Decoder) -> None:
    lacking = copy.copy(decoder)
    del lacking.max_len
    with pytest.raises(AttributeError, match="max_len"):
        native_module().Decoder(lacking)
