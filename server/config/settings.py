"""Every setting of Outrider, described; `settings_loader` reads them from their sources."""

import json
from typing import Self

from pydantic import SecretStr, model_validator

from .engine_settings import CacheSettings, EngineSettings, SchedulerSettings
from .model_names import name_of
from .pair_settings import DEFAULT_K, DraftSettings, SpeculationSettings, TargetSettings
from .section import SettingsSection
from .server_settings import ANY_NAME, ServerSettings


class Settings(SettingsSection):
    """All settings; `SECTION.KEY` in the file, `--set` and `OUTRIDER_SECTION__KEY` alike."""

    server: ServerSettings = ServerSettings()
    target: TargetSettings = TargetSettings()
    draft: DraftSettings = DraftSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    engine: EngineSettings = EngineSettings()

    def to_json(self) -> bytes:
        """The settings with their secrets: only for our own processes, through a pipe."""

        def plain(value: object) -> str:
            return value.get_secret_value() if isinstance(value, SecretStr) else str(value)

        return json.dumps(self.model_dump(exclude_unset=True), default=plain).encode()

    @model_validator(mode="after")
    def _draft_fits_target(self) -> Self:
        if self.draft.tensor_parallel not in (1, self.target.tensor_parallel):
            raise ValueError(
                f"draft.tensor_parallel is {self.draft.tensor_parallel}, target.tensor_parallel "
                f"{self.target.tensor_parallel or 'unset'}; a draft is whole, or shared by all "
                "that share the target: leave it out, or set both to one number"
            )
        if "draft_model" in self.speculation.proposer and self.draft.model is None:
            raise ValueError(
                "speculation.proposer has draft_model and draft.model is not set; name a draft "
                "of the target's family, or leave the proposer at 'auto', which knows some"
            )
        return self

    @model_validator(mode="after")
    def _steps_have_room(self) -> Self:
        num_rows, num_seqs = self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs
        if num_rows is None:
            return self
        if num_seqs is not None and num_seqs > num_rows:
            raise ValueError(
                f"scheduler.max_num_seqs is {num_seqs}, but a step has scheduler."
                f"max_num_batched_tokens ({num_rows}) rows, of which each sequence takes one at "
                "least; lower the first or raise the second"
            )
        k = self.speculation.num_speculative_tokens
        k = DEFAULT_K if k is None else k
        if self.speculation.proposer != ("none",) and k >= num_rows:
            raise ValueError(
                f"speculation.num_speculative_tokens is {k}, so that a sequence takes {k + 1} rows "
                f"of a step, but scheduler.max_num_batched_tokens is {num_rows}; lower the first "
                "or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _cache_is_of_use(self) -> Self:
        if self.cache.host_gib and not self.cache.prefix_caching:
            raise ValueError(
                f"cache.host_gib is {self.cache.host_gib:g}, but cache.prefix_caching is false, so "
                "that no page is kept: set it to 0"
            )
        num_pages, page_size = self.cache.num_pages, self.cache.page_size_tokens
        longest = self.engine.max_model_len or 2
        if num_pages is not None and (num_pages - 1) * page_size < longest:
            raise ValueError(
                f"cache.num_pages is {num_pages}, of cache.page_size_tokens ({page_size}) and one "
                f"for padding: they hold {(num_pages - 1) * page_size} tokens, but a sequence may "
                f"have {longest} (engine.max_model_len); raise the first or lower the last"
            )
        return self

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The model's own names; answers carry the first."""
        named = tuple(name for name in self.server.served_model_name if name != ANY_NAME)
        return named or (name_of(self.target.model),)
