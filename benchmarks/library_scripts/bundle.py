"""A MONAI bundle: network, data, loss and trainer are a config; ignite runs it."""

import torch
from monai.bundle import ConfigParser

config = {
    "imports": ["$import torch"],
    "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
    "network_def": {
        "_target_": "UNet",
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 2,
        "channels": [8, 16, 32],
        "strides": [2, 2],
        "num_res_units": 1,
    },
    "network": "$@network_def.to(@device)",
    "loss": {"_target_": "DiceCELoss", "to_onehot_y": True, "softmax": True},
    "optimizer": {"_target_": "torch.optim.Adam", "params": "$@network.parameters()", "lr": 0.001},
    "items": "$[{'image': torch.rand(1, 40, 40, 40), 'label': (torch.rand(1, 40, 40, 40) > 0.7).float()} for _ in range(8)]",
    "transforms": {
        "_target_": "Compose",
        "transforms": [
            {"_target_": "EnsureTyped", "keys": ["image", "label"]},
            {
                "_target_": "RandSpatialCropd",
                "keys": ["image", "label"],
                "roi_size": [32, 32, 32],
                "random_size": False,
            },
            {"_target_": "RandFlipd", "keys": ["image", "label"], "prob": 0.5, "spatial_axis": 0},
        ],
    },
    "dataset": {"_target_": "CacheDataset", "data": "@items", "transform": "@transforms", "progress": False},
    "loader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 2, "shuffle": True},
    "handlers": [{"_target_": "StatsHandler", "tag_name": "loss", "output_transform": "$lambda out: out[0]['loss']"}],
    "trainer": {
        "_target_": "SupervisedTrainer",
        "device": "@device",
        "max_epochs": 2,
        "train_data_loader": "@loader",
        "network": "@network",
        "loss_function": "@loss",
        "optimizer": "@optimizer",
        "amp": False,
        "inferer": {"_target_": "SimpleInferer"},
        "train_handlers": "@handlers",
    },
    "run": ["$@trainer.run()"],
}

parser = ConfigParser(config)
parser.get_parsed_content("run")
torch.save(parser.get_parsed_content("network").state_dict(), "bundle.pt")
