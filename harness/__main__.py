"""python -m harness strategy=zero3 model=7b: one run, or with -m or sweeps=NAME a sweep; ends with its table."""

import os
import signal
import sys
import tempfile

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends them without a traceback

import hydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness import compose, slurm
from harness.cli import arguments, composition_error
from harness.errors import UserError, unwritable
from harness.session import Session

CONF = compose.ROOT / "conf"


def main() -> int:
    """The exit status: 0 all ok or refused as measured, 1 a failure among the rows, 2 a mistake, 130 interrupted."""
    sys.argv[1:] = arguments(sys.argv[1:])
    session = Session()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors to us instead of printing them its own way
    compose.register()
    slurm.register()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            OmegaConf.register_new_resolver("harness.scratch", lambda: scratch, replace=True)
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(session.job)()
        session.go()
        return session.finish()
    except (HydraException, OmegaConfBaseException) as error:
        return session.refuse(composition_error(error))
    except UserError as error:
        return session.refuse(str(error))
    except OSError as error:  # a disk that is full, or was made read-only meanwhile
        return session.refuse(unwritable(error))
    except KeyboardInterrupt:
        return session.interrupted()


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
