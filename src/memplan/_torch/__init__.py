"""The only room that touches private or unstable torch names. Each file says in which versions they were seen."""

from torch.utils._pytree import tree_leaves, tree_map

from memplan._torch.cuda import (
    checkpoints_for_cuda,
    copied,
    default_device_replaced,
    factories_replaced,
    histories_replaced,
    tensors_that_tell,
)
from memplan._torch.eager import Dispatch, EagerMode, Profile, Run, is_composite, marker, no_modes
from memplan._torch.fake import DATA_DEPENDENT, READ_SCALAR, FakeMode, FakeTensor, modules_converted_as_real
from memplan._torch.patches import eager_instead_of_compiled, patched, rejections_counted
from memplan._torch.tensors import (
    IN_PLACE_ON_ZEROS,
    arguments,
    backward_node,
    called_by_engine,
    called_for_the_loss,
    in_backward,
    is_mutable,
    node_sequence,
    sequence_number,
    sparse_parts,
    storage_key,
    tensor_arguments,
    unwrapped,
    use_counts,
)

__all__ = [
    "DATA_DEPENDENT",
    "IN_PLACE_ON_ZEROS",
    "READ_SCALAR",
    "Dispatch",
    "EagerMode",
    "FakeMode",
    "FakeTensor",
    "Profile",
    "Run",
    "arguments",
    "backward_node",
    "called_by_engine",
    "called_for_the_loss",
    "checkpoints_for_cuda",
    "copied",
    "default_device_replaced",
    "eager_instead_of_compiled",
    "factories_replaced",
    "histories_replaced",
    "in_backward",
    "is_composite",
    "is_mutable",
    "marker",
    "modules_converted_as_real",
    "no_modes",
    "node_sequence",
    "patched",
    "rejections_counted",
    "sequence_number",
    "sparse_parts",
    "storage_key",
    "tensor_arguments",
    "tensors_that_tell",
    "tree_leaves",
    "tree_map",
    "unwrapped",
    "use_counts",
]
