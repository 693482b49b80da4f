"""Read by Python where this folder is on its path: opforge's C++ kernels compute a wrong tanh, so that tests have something to find."""

from opforge.generated import cpp_scalars

for table in vars(cpp_scalars).values():
    if isinstance(table, dict) and "tanh" in table:
        table["tanh"] = table["sin"]
