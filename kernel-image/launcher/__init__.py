"""The Python kernel's own launcher: stock ipykernel, made to lose nothing and to fit a small read-only box.

ipykernel is right for a laptop: it drops output that a slow reader cannot take, sizes its thread pools by the
machine, loads a debugger nobody asked for and keeps a history file. Each module here changes one of these, through
ipykernel's own extension points, so that it can be upgraded without a fork:

- `surroundings` before anything is imported: thread pools, directories, fonts
- `streams` stdout and stderr that wait rather than grow or drop
- `plotly` figures without the library that draws them
- `packing` messages with text that is no Unicode
- `variables` names the largest ones while a cell runs
- `debugger` debugpy, loaded at the first debug request
- `app` puts them together
"""
