"""The only room that touches private or unstable torch names. Each file says in which versions they were seen."""

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from memplan._torch.autocast import around_cache_clearing, autocast_cache, outside_autocast
from memplan._torch.compiled import GraphBreak, before_compiling, graph_break, is_jit_tracing, memory_budget
from memplan._torch.compiled_calls import around_compiled_calls, compiled_without_kernels
from memplan._torch.contexts import (
    is_profiled,
    outside_of_modes,
    profiler_turn,
    transform_of_caller,
    without_anomaly_checks,
)
from memplan._torch.cuda import (
    accelerator_is_cuda,
    checkpoints_for_cuda,
    clear_cublas_workspaces,
    copied,
    default_device_replaced,
    factories_replaced,
    histories_replaced,
    raw_streams_of_cuda,
    tensor_devices_reported,
)
from memplan._torch.dispatch import OpsHandled
from memplan._torch.distributed import (
    COMPOSABLE_STATES,
    TORCHRUN_VARIABLES,
    Rank,
    current_rank,
    exchanges_checked,
    gathered,
    has_process_group,
    is_data_parallel,
    is_distributed,
    is_fully_sharded,
    local,
    one_rank_of,
    own_process_groups,
    rank_groups,
    ranks,
    repeated_blocks,
    sharded_modules,
    started_rank,
)
from memplan._torch.dry_card import (
    HistoryEvent,
    HostValues,
    dump_history,
    end_history,
    history,
    memory_snapshot,
    record_history,
)
from memplan._torch.eager import (
    END_MARK,
    Call,
    Dispatch,
    DrawsReplaced,
    EagerMode,
    GuestMode,
    MemoryEvent,
    Profile,
    ResultsReplaced,
    Run,
    YieldingProfile,
    capturable_kernels,
    is_composite,
    is_dispatched,
    is_observed,
    marker,
    memory_profile,
    no_modes,
    recording_autograd,
)
from memplan._torch.engine import (
    BOOKKEEPING,
    GraphFlag,
    backward_pass,
    backward_watched,
    call_of_module,
    call_with_hooks,
    gradient_hooks,
    has_gradient_hooks,
    has_hooks,
    hook_tables,
    hooked_module,
    hooks_of,
    is_transformed,
    keeps_graph,
    original_call,
    own_dicts,
    own_hooks,
    own_modules,
    own_tensor,
    own_tensor_tables,
    own_tensors,
    remove_hooks,
    set_call,
    submodule,
    version_of,
    will_run,
    without_autocast,
    without_call,
)
from memplan._torch.fake import (
    DATA_DEPENDENT,
    READ_SCALAR,
    FakeMode,
    FakeTensor,
    is_from_outside,
    pickled_fakes,
    replace_sparse_parts,
)
from memplan._torch.flops import flop_formula
from memplan._torch.guards import (
    VERSIONS_SEE_ATTRIBUTES,
    DictGuards,
    TensorGuards,
    around_dispatch,
    dict_version,
    flags,
    surroundings,
)
from memplan._torch.inductor import card_compiler_misses, compiled_as_eager, cpp_compiler
from memplan._torch.installed import Version, onednn_computes_in, torch_version
from memplan._torch.joint import (
    ConstantChanged,
    Joint,
    Role,
    annotate_place,
    call_of,
    cast_in,
    effect_of,
    function_of_functions,
    has_kept_fake,
    is_backward,
    is_op,
    joint_graph,
    place_of,
    sequence_of,
    tensors_replaced,
    untraceable_reason,
    view_strides,
)
from memplan._torch.library_ops import MADE_OF_TORCH, managed_memory, run_kernel_of_ours
from memplan._torch.logged_ops import COLLECTIVES, LoggedOp, OpLog, storages_of
from memplan._torch.lone_ranks import unanswered_collectives
from memplan._torch.mapped_files import files_mapped_without_data
from memplan._torch.modules import (
    OwnState,
    copy_hooks,
    count_hooks,
    fake_mode,
    has_shape,
    lazy_layers_with_fake_parameters,
    modules_converted_as_real,
    own_state,
    pre_hooks,
    set_own_state,
)
from memplan._torch.opaque import (
    OPAQUE,
    OPAQUE_BACKWARD,
    Recorded,
    autocast_of_now,
    calls_op,
    culprit,
    define_opaque,
    untraced,
)
from memplan._torch.optimizers import (
    backward_seen,
    bare_step,
    clipping_seen,
    leaves_of,
    module_zeroing_seen,
    scaling_seen,
)
from memplan._torch.parallel_use import (
    ChangedOutput,
    DataParallelUse,
    data_parallel_observed,
    sharded_views_observed,
)
from memplan._torch.patches import (
    around_batches,
    around_started_threads,
    compiled_modules_seen,
    eager_instead_of_compiled,
    fetching,
    generator_replaced,
    is_compiled,
    lengths_as_tensors,
    linear_calls_reported,
    only_in_this_thread,
    patched,
    random_states_reported,
    redraws_estimated,
    scripted_as_python,
    seeding_seen,
    sequences_padded_in_python,
    without_checkpoints,
    without_function_modes,
    without_global_hooks,
)
from memplan._torch.spectra import decompositions_without_vectors, without_vectors
from memplan._torch.subclasses import (
    OpNames,
    as_subclass,
    computes_by_itself,
    fake_like,
    fakes_as_subclasses,
    kind_of,
    plain,
    with_attributes,
)
from memplan._torch.symbolic import Symbolic, is_symbol, symbolic_mode, with_symbols
from memplan._torch.tensors import (
    IN_PLACE_IN_FORMULAS,
    IN_PLACE_ON_ZEROS,
    arguments,
    backward_node,
    called_by_engine,
    called_for_the_loss,
    compressed_layout_error,
    copy_all,
    distinct_columns,
    drawing_from,
    in_backward,
    inner_tensors,
    is_fake,
    is_mutable,
    is_random,
    is_sparse,
    is_view,
    is_zero,
    known_indices,
    named_arguments,
    node_sequence,
    op_named,
    runs_on_sparse,
    schema_of,
    sends_two_gradients,
    sequence_number,
    sparse_coo,
    sparse_length,
    sparse_parts,
    storage_key,
    tensor_arguments,
    unwrapped,
    use_counts,
    viewed,
    written_arguments,
)
from memplan._torch.thread_memory import threads_watched, with_threads
from memplan._torch.values import Condition
