"""Models of Hugging Face's transformers whose experts run on a moed: `pip install "moed[transformers]"`.

    client = moed.Client("unix:/run/moed.sock", retries=3)
    model = moed.transformers.from_pretrained_without_experts("/models/mixtral-gptq", client)
    model.generate(...)                        # attention here, experts there; their weights were never read here
    print(model.moed)                          # which layers are remote

`attach` does the same to a model that is loaded already. docs/clients.md has the whole story. This package is imported on its own,
`import moed.transformers`; `import moed` needs neither torch nor transformers.
"""
try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(f"moed.transformers: wanted torch and transformers, as pip install \"moed[transformers]\" brings them; "
                      f"got: {error}") from error

from moed.transformers._attach import Attached, attach
from moed.transformers._blocks import RemoteMoe
from moed.transformers._loading import from_pretrained_without_experts

__all__ = ["Attached", "RemoteMoe", "attach", "from_pretrained_without_experts"]
