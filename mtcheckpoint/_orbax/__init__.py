"""The one door to Orbax: writing a share, translating arguments, policies and errors.

Everything here that is private to Orbax is marked so, and nothing of Orbax leaves this package
except its public argument and policy types.
"""

import orbax.checkpoint as ocp

from mtcheckpoint._orbax.arguments import (
    LeafRequest,
    composite_result,
    restore_request,
    state_to_save,
)
from mtcheckpoint._orbax.metadata import root_metadata, step_metadata
from mtcheckpoint._orbax.persistent import (
    catch_up_operation_id,
    open_persistent_manager,
    operation_id,
)
from mtcheckpoint._orbax.policies import (
    OrbaxPolicy,
    is_continuous,
    is_preservation_policy,
    is_save_decision_policy,
    split_policy,
)
from mtcheckpoint._orbax.writer import ShareWriter

__all__ = [
    "AbstractCheckpointManager",
    "LeafRequest",
    "OrbaxPolicy",
    "ShareWriter",
    "catch_up_operation_id",
    "composite_result",
    "is_continuous",
    "is_preservation_policy",
    "is_save_decision_policy",
    "open_persistent_manager",
    "operation_id",
    "restore_request",
    "root_metadata",
    "split_policy",
    "state_to_save",
    "step_metadata",
]

AbstractCheckpointManager = ocp.AbstractCheckpointManager
