"""Real architectures in plain Flax, with no precision code in them: what is measured against.

`MODELS["ResNet-50"]("tiny")` is a `Model`: a Linen module with batches and a loss. Sizes: "tiny" for tests,
"small" for a CPU, "full" as published.
"""

from benchmarks.models import (
    bert,
    conv_seq2seq,
    convnext,
    deep_speech2,
    dlrm,
    gnn,
    gpt,
    llama,
    mamba,
    multiplicative_lstm,
    resnet,
    ssd_vgg,
    transformer_xl,
    unet_partial,
    vit,
    wavenet,
)
from benchmarks.models._model import SIZES as SIZES
from benchmarks.models._model import Model as Model

MODELS = {
    "ResNet-50": resnet.make,
    "Conv seq2seq": conv_seq2seq.make,
    "DeepSpeech2": deep_speech2.make,
    "Multiplicative LSTM": multiplicative_lstm.make,
    "WaveNet": wavenet.make,
    "BERT-Large": bert.make,
    "GPT-2": gpt.make,
    "Transformer-XL": transformer_xl.make,
    "U-Net, partial convolutions": unet_partial.make,
    "SSD300, VGG-16": ssd_vgg.make,
}

#: Models of today, which are counted for an H100 only.
TODAY = {
    "Llama": llama.make,
    "Llama, scanned": llama.make_scanned,
    "Llama, experts": llama.make_moe,
    "ViT-B/16": vit.make,
    "DiT-B/4": vit.make_dit,
    "ConvNeXt-T": convnext.make,
    "Mamba": mamba.make,
    "DLRM": dlrm.make,
    "Graph network": gnn.make,
}
