"""Bodies that load and unload adapters, with vLLM's fields. Owns names and types."""

from __future__ import annotations

from pydantic import Field

from paceline.server.protocol.common import ApiModel


class LoadAdapterRequest(ApiModel):
    """``lora_path`` is a folder on the server's machine; ``model`` the adapter's, the first where
    it is not given."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    model: str | None = None


class UnloadAdapterRequest(ApiModel):
    """``lora_int_id`` is vLLM's own number of an adapter, which is not needed."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = None
