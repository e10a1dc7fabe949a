cwlVersion: v1.2
class: CommandLineTool
doc: Measure a global model on the validation data; the common start where there is none yet.
baseCommand: bash
arguments: [{position: 2, valueFrom: measure}, {position: 4, valueFrom: "--"}]
inputs:
  steps: {type: File, inputBinding: {position: 1}, default: {class: File, location: steps.sh}}
  site: {type: File, inputBinding: {position: 3, prefix: --site}}
  home: {type: string, inputBinding: {position: 3, prefix: --home}}
  cell: {type: string, inputBinding: {position: 3, prefix: --cell}}
  project: {type: Directory, inputBinding: {position: 3, prefix: --project}}
  configuration: {type: string, inputBinding: {position: 3, prefix: --configuration}}
  start: {type: Directory?, inputBinding: {position: 3, prefix: --start}}
  words: {type: "string[]", inputBinding: {position: 5}}
outputs:
  metrics: {type: File, outputBinding: {glob: metrics.json}}
