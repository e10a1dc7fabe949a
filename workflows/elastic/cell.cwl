cwlVersion: v1.2
class: CommandLineTool
doc: Train one cell from its start, or from where it was, to its end.
baseCommand: bash
arguments: [{position: 2, valueFrom: cell}, {position: 4, valueFrom: "--"}]
inputs:
  steps: {type: File, inputBinding: {position: 1}, default: {class: File, location: steps.sh}}
  site: {type: File, inputBinding: {position: 3, prefix: --site}}
  home: {type: string, inputBinding: {position: 3, prefix: --home}}
  cell: {type: string, inputBinding: {position: 3, prefix: --cell}}
  lighthouse: {type: string, inputBinding: {position: 3, prefix: --lighthouse}}
  project: {type: Directory, inputBinding: {position: 3, prefix: --project}}
  configuration: {type: string, inputBinding: {position: 3, prefix: --configuration}}
  words: {type: "string[]", inputBinding: {position: 5}}
outputs:
  run: {type: Directory, outputBinding: {glob: "cell_*"}}
