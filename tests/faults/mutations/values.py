"""What makes sure that values around tensors come back as they were, or that something is said."""

from __future__ import annotations

from tests.faults.mutations import Mutation

_VALUES = "tests/field/test_values.py"
_OPTIMIZERS = "tests/field/test_optimizers.py"

MUTATIONS = (
    Mutation(
        row="values: a key that only looks alike is another one",
        file="dcp_nvcomp/loading/matching.py",
        old="        _refuse_other_keys(paths, metadata)\n",
        new="        pass\n",
        tests="tests/properties/test_nested_states.py -k looks_alike",
    ),
    Mutation(
        row="values: ranks with keys that look alike are refused",
        file="dcp_nvcomp/format/metadata/paths.py",
        old="                if begin not in own or repr(own[begin]) != repr(keys[begin]):\n",
        new="                if False:\n",
        tests="tests/format/metadata/test_paths.py",
    ),
    Mutation(
        row="values: names that come to one without wrappers are not swapped",
        file="dcp_nvcomp/loading/matching.py",
        old="            if fqn not in saved and len(wanted[name]) == 1 == len(there.get(name, ())):\n",
        new="            if fqn not in saved and there.get(name):\n",
        tests=f"{_VALUES} -k never_swap",
    ),
    Mutation(
        row="values: what a load leaves is said",
        file="dcp_nvcomp/loading/planner.py",
        old="    if not left:\n",
        new="    if True:\n",
        tests=_VALUES,
    ),
    Mutation(
        row="values: state of an optimizer that has no place is named",
        file="dcp_nvcomp/runs/state/optimizers.py",
        old="    if missing:\n",
        new="    if False:\n",
        tests=_OPTIMIZERS,
    ),
    Mutation(
        row="values: state that load_state_dict converted keeps its bits",
        file="dcp_nvcomp/runs/state/optimizers.py",
        old="                    _set_state(optimizer.state, parameters[fqn], state.get(fqn, _NO_STATE))\n",
        new="                    pass\n",
        tests=f"{_OPTIMIZERS} -k wide",
    ),
    Mutation(
        row="values: views in objects take their own bytes",
        file="dcp_nvcomp/saving/encode/objects.py",
        old="        if views:\n",
        new="        if False:\n",
        tests=f"{_VALUES} -k views",
    ),
)
