cwlVersion: v1.2
class: CommandLineTool
doc: Start the lighthouse, unless it runs already; it runs until the last step.
baseCommand: bash
arguments: [{position: 2, valueFrom: lighthouse}]
inputs:
  steps: {type: File, inputBinding: {position: 1}, default: {class: File, location: steps.sh}}
  site: {type: File, inputBinding: {position: 3, prefix: --site}}
  home: {type: string, inputBinding: {position: 3, prefix: --home}}
  address: {type: string, inputBinding: {position: 3, prefix: --address}}
outputs: # in cwl.output.json
  url: string
