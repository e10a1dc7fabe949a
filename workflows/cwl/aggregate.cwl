cwlVersion: v1.2
class: CommandLineTool
doc: Make a round of the exports of all cells.
baseCommand: bash
arguments: [{position: 2, valueFrom: aggregate}, {position: 4, valueFrom: "--"}]
inputs:
  steps: {type: File, inputBinding: {position: 1}, default: {class: File, location: steps.sh}}
  site: {type: File, inputBinding: {position: 3, prefix: --site}}
  results: {type: string, inputBinding: {position: 3, prefix: --results}}
  round: {type: int, inputBinding: {position: 3, prefix: --round}}
  rounds: {type: int, inputBinding: {position: 3, prefix: --rounds}}
  metrics: {type: File?, inputBinding: {position: 3, prefix: --metrics}} # of the model that the round has started from
  exports: {type: "Directory[]", inputBinding: {position: 5}}
outputs: # in cwl.output.json
  model: Directory
  round: int
  more: boolean
