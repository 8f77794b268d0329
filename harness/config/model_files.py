"""Models by their configuration files: such a file, a folder that has one, or a name in the Hugging Face hub."""

import importlib.util
import sys
from pathlib import Path

from harness.util.text import UserError, one_line

FILE = "config.json"


def names_model(setting: str) -> bool:
    """Return whether a setting is `model=` with no preset's name, but a file, a folder or a name in the hub."""
    return setting.startswith("model=") and ("/" in setting or setting.endswith(".json"))


def config_file(path: str) -> Path:
    """Return the configuration file of a model. Of a model in the hub it is fetched unless the hub's cache has it.

    HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE say where from. Nothing but this file is fetched. Raises UserError
    if there is none.
    """
    local = Path(path).expanduser()
    for file in (local, local / FILE):
        if file.is_file():
            return file
    choices = "name a config.json, a folder that has one, or a model in the hub"
    if local.exists() or "/" not in path or path.startswith((".", "/", "~")) or path.endswith(".json"):
        raise UserError(f"model.path={path} is no {FILE} and no folder with one: {choices}")
    return _file_of_hub(path, choices)


def require_library() -> None:
    """Raise UserError if the transformers library, which trains and traces such models, is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise UserError("model=hf needs the transformers library: pip install 'training-harness[hf]'")


def _file_of_hub(name: str, choices: str) -> Path:
    """Return the configuration file of a model in the hub, which the library may have to fetch."""
    from huggingface_hub import errors, hf_hub_download, try_to_load_from_cache  # takes a third of a second
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.utils.logging import set_verbosity_error

    set_verbosity_error()  # type: ignore[no-untyped-call]  # of five retries
    try:
        if isinstance(cached := try_to_load_from_cache(name, FILE), str):
            return Path(cached)
        print(f"Fetching {FILE} of {name} from {ENDPOINT} …", file=sys.stderr)
        return Path(hf_hub_download(name, FILE))
    except errors.GatedRepoError:
        reason, choices = "is gated", "ask for access on its page, then log in with hf auth login"
    except errors.RepositoryNotFoundError:
        reason = f"is no model at {ENDPOINT}, or a private one"
    except errors.HFValidationError:
        reason = f"is no {FILE}, no folder with one and no name in the hub"
    except errors.EntryNotFoundError as error:
        cause = one_line(error.__cause__ or error)
        reason = f"has no {FILE} in the hub's cache, and none can be fetched ({cause})"
    except OSError as error:
        reason = f"cannot be fetched ({one_line(error)})"
    raise UserError(f"model.path={name} {reason}: {choices}") from None
