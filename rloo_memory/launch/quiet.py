"""Keeps what libraries print at import and load out of the launcher's output; errors and TRL's training log stay."""

import logging
import os
import sys
import warnings


def before_import() -> None:
    """Before torch, transformers and bitsandbytes are imported. `python -W` brings the warnings back."""
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
    # on a CPU it looks for kernels that nothing here needs
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def after_import() -> None:
    """Progress bars for weights and tables that are read and written go, those of downloads stay."""
    import datasets
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it raises what it logs
    transformers_logging.disable_progress_bar()
    if not os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
        enable_progress_bars()  # those of downloads, which transformers switched off, too
    for handler in logging.getLogger("transformers").handlers:  # deprecations are for those who call the library
        handler.addFilter(lambda record: "deprecated" not in record.getMessage())
